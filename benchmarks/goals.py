"""The design's goals for a Hopper GPU, N = 16,384, and how far a run is from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import OK
from .problem import FORWARD, FORWARD_BACKWARD, LOGPROB
from .record import Measurement
from .tables import OURS, TIMES

TOKENS = 16_384
EXACT = "ours, tolerance 0"
VOCABULARY = {896: 151_936, 2048: 151_936, 4096: 128_256}  # by H
SPARSE = {896: 1.3, 2048: 1.18, 4096: 1.12}  # in products X Wᵀ, trainable head
WITHOUT_LOSS = {896: 3.3, 2048: 3.2, 4096: 3.1}
FROZEN, FORWARD_ALONE = {2048: 1.12}, 1.03
EXTRA_MIB = 300.0  # beyond the results
LOGPROB_ERROR, GRADIENT_ERROR = 1e-5, 2.5e-3


def is_goal(shape: dict[str, Any]) -> bool:
    """Whether a goal is stated for this setting."""
    of_model = shape["rows"] in ("real", "histogram") and shape["loss"] == LOGPROB
    if not of_model or shape["tokens"] != TOKENS or VOCABULARY.get(shape["hidden"]) != shape["vocabulary"]:
        return False
    return shape["mode"] == FORWARD or shape["trainable"] or shape["hidden"] in FROZEN


def verdicts(cells: Sequence[Measurement]) -> list[str]:
    """Every goal, in the order of the hidden sizes; of several measurements for one goal, the first."""
    known: dict[tuple[object, ...], Measurement] = {}
    for cell in cells:
        if cell.status == OK and is_goal(cell.shape):
            key = (cell.implementation, *(cell.shape[name] for name in ("hidden", "mode", "trainable")))
            known.setdefault(key, cell)
    found = []
    for hidden in VOCABULARY:
        ours = known.get((OURS, hidden, FORWARD_BACKWARD, True))
        exact = known.get((EXACT, hidden, FORWARD_BACKWARD, True))
        errors = {} if ours is None else ours.accuracy
        goals = [
            ("sparse", SPARSE[hidden], _multiple(ours), TIMES),
            ("exact", WITHOUT_LOSS[hidden], _multiple(exact), TIMES),
            ("memory beyond the results", EXTRA_MIB, _mebibytes_beyond(ours), " MiB"),
            ("worst |Δlogp|", LOGPROB_ERROR, errors.get("logprob"), " nat"),
            ("relative dX", GRADIENT_ERROR, errors.get("hidden_gradient"), ""),
            ("relative dW", GRADIENT_ERROR, errors.get("weight_gradient"), ""),
            ("forward alone", FORWARD_ALONE, _multiple(known.get((OURS, hidden, FORWARD, True))), TIMES),
        ]
        if hidden in FROZEN:
            frozen = known.get((OURS, hidden, FORWARD_BACKWARD, False))
            goals.append(("frozen head", FROZEN[hidden], _multiple(frozen), TIMES))
        found += [f"H = {hidden}, {what}: {_verdict(*goal)}" for what, *goal in goals]
    return found


def _verdict(goal: float, found: float | None, unit: str) -> str:
    if found is None:
        return f"goal ≤ {goal:.4g}{unit}, not measured"
    verdict = "met" if found <= goal else f"missed by {found / goal - 1:.1%}"
    return f"goal ≤ {goal:.4g}{unit}, found {found:.4g}{unit}: {verdict}"


def _multiple(cell: Measurement | None) -> float | None:
    if cell is None or cell.time is None or "product_seconds" not in cell.ceilings:
        return None
    return cell.time.median / 1e3 / cell.ceilings["product_seconds"]


def _mebibytes_beyond(cell: Measurement | None) -> float | None:
    if cell is None or cell.memory is None or cell.memory.allocator is None:
        return None
    return max(0.0, cell.memory.allocator - cell.metrics["output_bytes"]) / 2**20
