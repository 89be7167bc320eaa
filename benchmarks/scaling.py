"""`python -m benchmarks scaling`: time and memory of the head against N and V, with fitted exponents.

One axis moves at a time. Beside what was measured stands what the memory planner predicts for ours, so that
the model which decides about groups and micro-batches is held against the allocator. A power of one is the
least that reading every row and every vocabulary entry allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .cell import CellRun, Limits
from .failures import OK as WENT_WELL
from .failures import failure_of
from .fit import fit_power_law
from .peers import Peer, all_peers, choose
from .problem import DTYPES, FORWARD_BACKWARD, Setting
from .record import OK, STATUS, Measurement, measurements
from .row_sources import Sources, make_problem
from .session import add_common_arguments, check_common, positive, run_session
from .timing import synchronize

KIND = "scaling"
MODEL_CHECK = "memory model of ours"
_USUAL = ("ours", "torch full logits")
_CUDA = (
    (1024, 4096, 16_384, 65_536, 262_144),
    (16_384, 32_768, 65_536, 131_072, 262_144),
    16_384,
    65_536,
    2048,
)
_CPU = ((64, 128, 256, 512), (1024, 2048, 4096, 8192), 128, 4096, 128)
_AXES = ("tokens", "vocabulary")


class ScalingBout:
    """One size: the implementations in turn, as `head` measures them, and the memory model of ours."""

    def __init__(self, setting: Setting, axis: str, peers: Sequence[Peer], device: torch.device) -> None:
        self.setting = setting
        self.axis = axis
        self.shape: dict[str, Any] = {"axis": axis, **vars(setting)}
        self._peers = peers
        self._device = device
        self._found: list[Measurement] = []

    def measure(self, limits: Limits) -> None:
        run = CellRun(self.setting, Sources(), self._device, limits, self._peers)
        try:
            run.measure()
        finally:
            self._found = [replace(one, shape=self.shape) for one in measurements(run.result())]
        if not limits.passed and any(peer.name.startswith("ours") for peer in self._peers):
            self._found.append(check_memory_model(self.setting, self.shape, self._device, limits.seed))

    def results(self) -> list[Measurement]:
        return self._found


def check_memory_model(
    setting: Setting, shape: dict[str, Any], device: torch.device, seed: int
) -> Measurement:
    """Bytes of forward and backward beyond the operands, their gradients included: predicted, and counted."""
    try:
        counted = _counted_bytes(setting, device, seed)
        predicted = _predicted_bytes(setting, device)
    except Exception as error:
        state, reason = failure_of(error)
        return Measurement(MODEL_CHECK, shape, STATUS[state], reason)
    ratio = {"predicted_over_counted": predicted / counted} if counted else {}
    metrics = {"predicted_bytes": float(predicted), "counted_bytes": float(counted)} | ratio
    return Measurement(MODEL_CHECK, shape, STATUS[WENT_WELL], metrics=metrics)


def _counted_bytes(setting: Setting, device: torch.device, seed: int) -> int:
    """By the allocator, with the entropy as a metric, as a training step asks for it."""
    from grpo_fast import linear_logprob
    from grpo_fast.plan.measure import peak_bytes

    problem = make_problem(setting, Sources(), device, seed)

    def run(_: object = None) -> None:
        outputs = ("logprob", "entropy")
        problem.finish(
            linear_logprob(problem.hidden, problem.weight, problem.targets, outputs=outputs).logprob
        )

    run()
    problem.clear()
    synchronize(device)
    return peak_bytes(lambda: None, run, device)


def _predicted_bytes(setting: Setting, device: torch.device) -> int:
    from grpo_fast.head.operator import device_facts
    from grpo_fast.plan.head_bytes import head_bytes

    dtype = DTYPES[setting.dtype]
    parts = head_bytes(
        device_facts(device.type, device.index),
        rows=setting.tokens,
        hidden=setting.hidden,
        vocabulary=setting.vocabulary,
        dtype=dtype,
        weight_trained=setting.trainable,
    )
    vectors = setting.tokens + setting.trainable * setting.vocabulary
    gradients = vectors * setting.hidden * dtype.itemsize
    return parts.kept + max(parts.forward, parts.backward + gradients)


def exponents(found: Sequence[Measurement]) -> list[Measurement]:
    """The fits of every implementation along every axis, as measurements of the axis."""
    fits = []
    for axis in _AXES:
        along = [one for one in found if one.status == OK and one.shape.get("axis") == axis]
        for name in {one.implementation: None for one in along}:
            members = [one for one in along if one.implementation == name]
            metrics = _exponents_of(members, axis)
            if metrics:
                sizes = [one.shape[axis] for one in members]
                shape = {"fit": axis, "from": min(sizes), "to": max(sizes)}
                fits.append(Measurement(name, shape, metrics=metrics))
    return fits


def _exponents_of(members: Sequence[Measurement], axis: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for what, values in (
        ("time", [one.time and one.time.median for one in members]),
        ("memory", [_peak(one) for one in members]),
    ):
        pairs = [(one.shape[axis], value) for one, value in zip(members, values, strict=True) if value]
        law = fit_power_law(*zip(*pairs, strict=True)) if pairs else None
        if law is not None:
            metrics |= {
                f"{what}_exponent": law.exponent,
                f"{what}_exponent_lower": law.lower,
                f"{what}_exponent_upper": law.upper,
            }
    return metrics


def _peak(one: Measurement) -> float | None:
    if one.implementation == MODEL_CHECK:
        return one.metrics.get("counted_bytes")
    if one.memory is None:
        return None
    return one.memory.allocator or one.memory.driver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8, repeats=9)
    parser.add_argument(
        "--tokens", type=positive, nargs="+", help="the axis of N (1,024 to 262,144; a CPU's are fewer)"
    )
    parser.add_argument("--vocab", type=positive, nargs="+", help="the axis of V (16,384 to 262,144)")
    parser.add_argument("--at-tokens", type=positive, help="N while V moves (16,384; on a CPU 128)")
    parser.add_argument("--at-vocab", type=positive, help="V while N moves (65,536; on a CPU 4096)")
    parser.add_argument("--hidden", type=positive, help="H (2048; on a CPU 128)")
    parser.add_argument("--rows", choices=("peaked", "flat"), default="peaked", help="kind of rows (peaked)")
    parser.add_argument("--frozen", action="store_true", help="no gradient for the head")
    parser.add_argument("--oracle", action="store_true", help="judge the results' accuracy too")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    peers = choose(all_peers(), options.impl)
    if options.impl is None:
        peers = [peer for peer in peers if peer.name in _USUAL]
    tokens, vocabularies, at_tokens, at_vocabulary, hidden = _CUDA if device.type == "cuda" else _CPU
    at_tokens, at_vocabulary = options.at_tokens or at_tokens, options.at_vocab or at_vocabulary
    hidden = options.hidden or hidden

    def bout(axis: str, n: int, v: int) -> ScalingBout:
        setting = Setting(options.rows, n, hidden, v, FORWARD_BACKWARD, not options.frozen, options.dtype)
        return ScalingBout(setting, axis, peers, device)

    bouts = [bout("tokens", n, at_vocabulary) for n in options.tokens or tokens]
    bouts += [bout("vocabulary", at_tokens, v) for v in options.vocab or vocabularies]
    return run_session(KIND, options, device, bouts, conclude=exponents)
