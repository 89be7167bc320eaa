"""The objective of ranked groups that a run asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

RankingObjective = Literal["plackett_luce", "pairwise", "advantage", "advantage_likelihood"]

# Fields that each objective reads, besides its name.
_READS: dict[str, frozenset[str]] = {
    "plackett_luce": frozenset({"score", "length_normalised", "temperature"}),
    "pairwise": frozenset({"score", "length_normalised", "temperature"}),
    "advantage": frozenset({"epsilon_low", "epsilon_high"}),
    "advantage_likelihood": frozenset({"length_normalised", "temperature"}),
}


@dataclass(frozen=True)
class RankingLossConfig:
    """Which objective, and its constants. A field that it does not read must be left alone.

    | objective | what it does |
    |---|---|
    | `plackett_luce` | likelihood of the whole order, ties included, under scores divided by `temperature` |
    | `pairwise` | logistic loss of every two responses of different rank |
    | `advantage` | standardised ranks as advantages, clipped ratio to the policy that wrote the responses |
    | `advantage_likelihood` | likelihood of each response, weighted by exp(advantage / `temperature`) |

    Raises:
        ValueError: an unknown objective, a value out of its range, or one that the objective does not read.
    """

    # pydantic reads this when the root configuration holds this class: unknown keys are errors.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    objective: RankingObjective = "plackett_luce"
    score: Literal["logratio", "logprob"] = "logratio"  # against the reference model, or without one
    length_normalised: bool = False  # scores per token
    temperature: float | None = (
        None  # divides scores (its inverse is DPO's beta); None: 10 summed, 1 per token
    )
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2

    def __post_init__(self) -> None:
        if self.objective not in get_args(RankingObjective):
            raise ValueError(
                f"objective = {self.objective!r} is unknown; choose among "
                f"{', '.join(get_args(RankingObjective))}"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in _READS[self.objective] | {"objective"} and value != f.default:
                raise ValueError(
                    f"{f.name} = {value} is not read by objective = {self.objective!r}; leave it out"
                )
        if self.temperature is None and self.objective != "advantage":
            summed = self.objective != "advantage_likelihood" and not self.length_normalised
            object.__setattr__(self, "temperature", 10.0 if summed else 1.0)
        for name in ("temperature", "epsilon_low", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value} is out of range; give a finite number above zero")

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities must be computed."""
        if self.objective == "advantage":
            return True
        return self.score == "logratio" and self.objective != "advantage_likelihood"

    @property
    def averaged(self) -> bool:
        """Whether log-probabilities per token are what training moves."""
        return self.length_normalised or self.objective == "advantage"
