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

from .contest import Contest, Entrant, Found
from .head import HeadContests
from .measure import OK, memory_of
from .peers import all_peers, choose
from .problem import DTYPES, FORWARD_BACKWARD, PRODUCT, Setting
from .record import Measurement
from .rows import make_problem
from .session import add_common_arguments, add_sizes, check_common, run_session
from .tables import OURS

MODEL_CHECK = "memory model of ours"
_USUAL = (OURS, "torch full logits")
_AXES = {
    "tokens": ((1024, 4096, 16_384, 65_536, 262_144), (64, 128, 256, 512), "the axis of N"),
    "vocab": ((16_384, 32_768, 65_536, 131_072, 262_144), (1024, 2048, 4096, 8192), "the axis of V"),
}
_FIXED = {
    "at_tokens": (16_384, 128, "N while the other axis moves"),
    "at_vocab": (65_536, 4096, "V while the other axis moves"),
    "hidden": (2048, 128, "H"),
}
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""


def check_memory_model(setting: Setting, device: torch.device, seed: int) -> Found:
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

    def run() -> None:
        batch = problem.hidden, problem.weight, problem.targets
        problem.finish(linear_logprob(*batch, outputs=("logprob", "entropy")).logprob)

    run()
    problem.clear()
    counted = memory_of(run, device).allocator
    metrics = {"predicted_bytes": float(predicted), "counted_bytes": float(counted)}
    return {"metrics": metrics | {"predicted_over_counted": predicted / counted}}


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
    add_sizes(parser, _AXES, nargs="+")
    add_sizes(parser, _FIXED)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    peers = [peer for peer in choose(all_peers(), options.impl) if options.impl or peer.name in _USUAL]
    of_ours = any(peer.name.startswith(OURS) for peer in peers)
    contests = HeadContests(peers, device, options.seed, judged=False)

    def contest(axis: str, n: int, v: int) -> Contest:
        setting = Setting("peaked", n, options.hidden, v, FORWARD_BACKWARD, True, options.dtype)
        check = Entrant(MODEL_CHECK, partial(check_memory_model, setting, device, options.seed))
        return contests.contest(setting, others=[check] if of_ours else [], axis=axis)

    bouts = [contest("tokens", n, options.at_vocab) for n in options.tokens]
    bouts += [contest("vocabulary", options.at_tokens, v) for v in options.vocab]
    return run_session(options, bouts, conclude=exponents)
