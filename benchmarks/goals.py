"""The design's goals for a Hopper GPU, N = 16,384, and how far a run is from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .measure import OK
from .problem import FORWARD, FORWARD_BACKWARD, LOGPROB
from .record import Measurement
from .tables import OURS, TIMES

TOKENS = 16_384
EXACT = "ours, tolerance 0"
VOCABULARY = {896: 151_936, 2048: 151_936, 4096: 128_256}  # by H
CERTIFIED = {896: 1.4, 2048: 1.2, 4096: 1.12}  # in products X Wᵀ, trainable head
WITHOUT_LOSS = {896: 3.6, 2048: 3.3, 4096: 3.2}
FROZEN, FORWARD_ALONE = {2048: 1.12}, 1.03
EXTRA_MIB = 300.0  # beyond the results
LOGPROB_ERROR, GRADIENT_ERROR = 1e-5, 2.5e-3


@dataclass(frozen=True)
class Verdict:
    """One goal against one measurement."""

    what: str
    goal: float
    found: float | None  # None: not measured
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.found is not None and self.found <= self.goal

    def __str__(self) -> str:
        goal = f"{self.what}: goal ≤ {self.goal:.4g}{self.unit}"
        if self.found is None:
            return f"{goal}, not measured"
        verdict = "met" if self.met else f"missed by {self.found / self.goal - 1:.1%}"
        return f"{goal}, found {self.found:.4g}{self.unit}: {verdict}"


def is_goal(shape: dict[str, Any]) -> bool:
    """Whether a goal is stated for this setting."""
    of_model = shape["rows"] in ("real", "histogram") and shape["loss"] == LOGPROB
    if not of_model or shape["tokens"] != TOKENS or VOCABULARY.get(shape["hidden"]) != shape["vocabulary"]:
        return False
    return shape["mode"] == FORWARD or shape["trainable"] or shape["hidden"] in FROZEN


def verdicts(cells: Sequence[Measurement]) -> list[Verdict]:
    """Every goal, in the order of the hidden sizes; of several measurements for one goal, the first."""

    def value(of: Callable[[Measurement], float | None], name: str, hidden: int, mode: str, trainable: bool
              ) -> float | None:  # fmt: skip
        wanted = {"hidden": hidden, "mode": mode, "trainable": trainable}
        for cell in cells:
            is_it = (cell.implementation, cell.status) == (name, OK) and is_goal(cell.shape)
            if is_it and wanted.items() <= cell.shape.items():
                return of(cell)
        return None

    found: list[Verdict] = []
    for hidden in VOCABULARY:
        trained = hidden, FORWARD_BACKWARD, True
        goals = [
            Verdict("certified", CERTIFIED[hidden], value(_multiple, OURS, *trained), TIMES),
            Verdict("exact", WITHOUT_LOSS[hidden], value(_multiple, EXACT, *trained), TIMES),
            Verdict("memory beyond the results", EXTRA_MIB, value(_mebibytes_beyond, OURS, *trained), " MiB"),
            Verdict("worst |Δlogp|", LOGPROB_ERROR, value(_error("logprob"), OURS, *trained), " nat"),
            Verdict("relative dX", GRADIENT_ERROR, value(_error("hidden_gradient"), OURS, *trained)),
            Verdict("relative dW", GRADIENT_ERROR, value(_error("weight_gradient"), OURS, *trained)),
            Verdict("forward alone", FORWARD_ALONE, value(_multiple, OURS, hidden, FORWARD, True), TIMES),
        ]
        if hidden in FROZEN:
            frozen = value(_multiple, OURS, hidden, FORWARD_BACKWARD, False)
            goals.append(Verdict("frozen head", FROZEN[hidden], frozen, TIMES))
        found += [replace(goal, what=f"H = {hidden}, {goal.what}") for goal in goals]
    return found


def _multiple(cell: Measurement) -> float | None:
    seconds = cell.ceilings.get("product_seconds")
    return None if cell.time is None or not seconds else cell.time.median / 1e3 / seconds


def _mebibytes_beyond(cell: Measurement) -> float | None:
    if cell.memory is None or cell.memory.allocator is None:
        return None
    return max(0.0, cell.memory.allocator - cell.metrics["output_bytes"]) / 2**20


def _error(name: str) -> Callable[[Measurement], float | None]:
    return lambda cell: cell.accuracy.get(name)
