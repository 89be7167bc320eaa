"""The design's goals for a Hopper GPU, N = 16,384, and how far a run is from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cell import Cell, Result
from .failures import OK
from .losses import LOGPROB
from .problem import FORWARD, FORWARD_BACKWARD, Setting

TOKENS = 16_384
TIMES = "\N{MULTIPLICATION SIGN}"
OURS, EXACT = "ours", "ours, tolerance 0"
VOCABULARY = {896: 151_936, 2048: 151_936, 4096: 128_256}  # by H
CERTIFIED = {896: 1.4, 2048: 1.2, 4096: 1.12}  # in products X Wᵀ, trainable head
WITHOUT_LOSS = {896: 3.6, 2048: 3.3, 4096: 3.2}
FROZEN, FORWARD_ALONE = {2048: 1.12}, 1.03
EXTRA_BYTES = 300 << 20  # beyond the results
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


def is_goal(setting: Setting) -> bool:
    """Whether a goal is stated for this setting."""
    of_model = setting.rows in ("real", "histogram") and setting.loss == LOGPROB
    if not of_model or setting.tokens != TOKENS or VOCABULARY.get(setting.hidden) != setting.vocabulary:
        return False
    return setting.mode == FORWARD or setting.trainable or setting.hidden in FROZEN


def verdicts(cells: Sequence[Cell]) -> list[Verdict]:
    """Every goal, in the order of the hidden sizes; of several cells for one goal, the first."""
    found: list[Verdict] = []
    for hidden in VOCABULARY:
        trained = _cell(cells, hidden, FORWARD_BACKWARD, True)
        at = f"H = {hidden}"
        found.append(Verdict(f"{at}, certified", CERTIFIED[hidden], _multiple(trained, OURS), TIMES))
        found.append(Verdict(f"{at}, exact", WITHOUT_LOSS[hidden], _multiple(trained, EXACT), TIMES))
        found += _quality(at, trained)
        forward = _cell(cells, hidden, FORWARD, True)
        found.append(Verdict(f"{at}, forward alone", FORWARD_ALONE, _multiple(forward, OURS), TIMES))
        if hidden in FROZEN:
            frozen = _cell(cells, hidden, FORWARD_BACKWARD, False)
            found.append(Verdict(f"{at}, frozen head", FROZEN[hidden], _multiple(frozen, OURS), TIMES))
    return found


def _quality(at: str, cell: Cell | None) -> list[Verdict]:
    result = _result(cell, OURS)
    beyond = None
    if result is not None and result.memory is not None and result.memory.allocator is not None:
        beyond = max(0, result.memory.allocator - cell.output_bytes) / 2**20
    accuracy = None if result is None else result.accuracy
    return [
        Verdict(f"{at}, memory beyond the results", EXTRA_BYTES / 2**20, beyond, " MiB"),
        Verdict(f"{at}, worst |Δlogp|", LOGPROB_ERROR, accuracy and accuracy.logprob, " nat"),
        Verdict(f"{at}, relative dX", GRADIENT_ERROR, accuracy and accuracy.hidden_gradient),
        Verdict(f"{at}, relative dW", GRADIENT_ERROR, accuracy and accuracy.weight_gradient),
    ]


def _cell(cells: Sequence[Cell], hidden: int, mode: str, trainable: bool) -> Cell | None:
    def fits(s: Setting) -> bool:
        return is_goal(s) and s.hidden == hidden and s.mode == mode and s.trainable == trainable

    return next((cell for cell in cells if fits(cell.setting)), None)


def _result(cell: Cell | None, name: str) -> Result | None:
    results = [] if cell is None else cell.results
    return next((r for r in results if r.name == name and r.state == OK), None)


def _multiple(cell: Cell | None, name: str) -> float | None:
    result = _result(cell, name)
    if result is None or result.time is None or cell.product is None:
        return None
    return result.time.median / cell.product.median
