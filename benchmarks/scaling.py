"""`python -m benchmarks scaling`: time and memory of the head against N and V, with fitted exponents.

One axis moves at a time. Beside what was measured stands what the memory planner predicts for ours, so that
the model which decides about groups and micro-batches is held against the allocator. A power of one is the
least that reading every row and every vocabulary entry allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from grpo_fast import linear_logprob
from grpo_fast.head.operator import device_facts
from grpo_fast.head.plan import Workload
from grpo_fast.plan.head_bytes import head_bytes
from grpo_fast.plan.measure import peak_bytes

from .contest import Contest, Entrant, Prepared
from .head import HeadContests
from .measure import OK, synchronize
from .peers import all_peers, choose
from .problem import DTYPES, FORWARD_BACKWARD, PRODUCT, Setting
from .record import Measurement
from .rows import make_problem
from .session import add_common_arguments, check_common, positive, run_session
from .tables import OURS

MODEL_CHECK = "memory model of ours"
_USUAL = (OURS, "torch full logits")
_SIZES = {  # N along its axis, V along its axis, and N, V and H while the others move
    "cuda": ((1024, 4096, 16_384, 65_536, 262_144), (16_384, 32_768, 65_536, 131_072, 262_144),
             (16_384, 65_536, 2048)),
    "cpu": ((64, 128, 256, 512), (1024, 2048, 4096, 8192), (128, 4096, 128)),
}  # fmt: skip
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""


def check_memory_model(setting: Setting, device: torch.device, seed: int) -> Prepared:
    """Bytes of forward and backward beyond the operands, their gradients included: predicted, and counted by
    the allocator; with the entropy as a metric, as a training step asks for it."""
    dtype = DTYPES[setting.dtype]
    sizes = setting.tokens, setting.vocabulary, dtype
    call = Workload(*sizes, extra_statistics=1, hidden_size=setting.hidden, trainable=setting.trainable)
    parts = head_bytes(device_facts(device.type, device.index), call)
    vectors = setting.tokens + setting.trainable * setting.vocabulary
    gradients = vectors * setting.hidden * dtype.itemsize
    predicted = parts.kept + max(parts.forward, parts.backward + gradients)

    problem = make_problem(setting, device, seed)

    def run(_: object = None) -> None:
        batch = problem.hidden, problem.weight, problem.targets
        problem.finish(linear_logprob(*batch, outputs=("logprob", "entropy")).logprob)

    run()
    problem.clear()
    synchronize(device)
    counted = peak_bytes(lambda: None, run, device)
    metrics = {"predicted_bytes": float(predicted), "counted_bytes": float(counted)}
    ratio = {"predicted_over_counted": predicted / counted} if counted else {}
    return Prepared(None, metrics=lambda _: metrics | ratio)


def exponents(found: Sequence[Measurement]) -> list[Measurement]:
    """The fits of every implementation along every axis, as measurements of the axis."""
    fits = []
    for axis in ("tokens", "vocabulary"):
        along = [one for one in found if one.status == OK and one.shape.get("axis") == axis]
        for name in {one.implementation: None for one in along if one.implementation != PRODUCT}:
            members = [one for one in along if one.implementation == name]
            times = {one.shape[axis]: one.time.median for one in members if one.time}
            peaks = {one.shape[axis]: one.metrics.get("counted_bytes", one.peak_bytes) for one in members}
            metrics = {}
            for what, values in (("time", times), ("memory", peaks)):
                fit = fit_power_law({size: value for size, value in values.items() if value})
                names = (f"{what}_exponent{end}" for end in ("", "_lower", "_upper"))
                metrics |= dict(zip(names, fit, strict=False))  # a fit of too little is empty
            if metrics:
                sizes = [one.shape[axis] for one in members]
                shape = {"fit": axis, "from": min(sizes), "to": max(sizes)}
                fits.append(Measurement(name, shape, metrics=metrics))
    return fits


def fit_power_law(points: Mapping[float, float]) -> tuple[float, ...]:
    """The exponent of y ≈ factor · x^exponent by least squares on logarithms, and its 95 % interval.

    Nothing for fewer than three points. The interval supposes that the logarithms scatter normally about one
    line; a curve bends it, and shows as a wide one.
    """
    if len(points) < 3:
        return ()
    (exponent, _), covariance = np.polyfit(np.log(list(points)), np.log(list(points.values())), 1, cov=True)
    t = _T_95[min(len(points) - 2, len(_T_95)) - 1]
    half = t * np.sqrt(covariance[0, 0])
    return float(exponent), float(exponent - half), float(exponent + half)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    for axis, what in (("tokens", "N"), ("vocab", "V")):
        parser.add_argument(f"--{axis}", type=positive, nargs="+", help=f"the axis of {what}")
        parser.add_argument(f"--at-{axis}", type=positive, help=f"{what} while the other axis moves")
    parser.add_argument("--hidden", type=positive, help="H")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    peers = [peer for peer in choose(all_peers(), options.impl) if options.impl or peer.name in _USUAL]
    of_ours = any(peer.name.startswith(OURS) for peer in peers)
    contests = HeadContests(peers, device, options.seed, judged=False)
    tokens, vocabularies, fixed = _SIZES[device.type]
    asked = (options.at_tokens, options.at_vocab, options.hidden)
    at_tokens, at_vocab, hidden = (given or usual for given, usual in zip(asked, fixed, strict=True))

    def contest(axis: str, n: int, v: int) -> Contest:
        setting = Setting("peaked", n, hidden, v, FORWARD_BACKWARD, True, options.dtype)
        check = Entrant(MODEL_CHECK, partial(check_memory_model, setting, device, options.seed))
        return contests.contest(setting, others=[check] if of_ours else [], axis=axis)

    bouts = [contest("tokens", n, at_vocab) for n in options.tokens or tokens]
    bouts += [contest("vocabulary", at_tokens, v) for v in options.vocab or vocabularies]
    return run_session(options, bouts, conclude=exponents)
