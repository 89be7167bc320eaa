"""The preference loss that a run asks for. Names are TRL's where TRL has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from grpo_fast.objective.pairs_catalog import PREFERENCE_LOSSES, PreferenceFacts

_LOSS_SPECIFIC = frozenset().union(*(facts.fields for facts in PREFERENCE_LOSSES.values()))
_NOT_NEGATIVE = ("gamma", "desirable_weight", "undesirable_weight", "cpo_alpha")


@dataclass(frozen=True)
class PreferenceLossConfig:
    """One loss, or a weighted sum of several, and its constants.

    A field that none of the losses reads must be left alone; `beta` holds the value in force once the
    configuration is made. A factor on the log-ratio of the policy to the reference is a beta, whatever else a
    method calls it; a bonus for correctness or syntax is a margin of its pair and is not multiplied by beta.

    Raises:
        ValueError: a value out of its range, or contradicting another; the message names the field, the
            value and the remedy.
    """

    # pydantic reads this when the root configuration holds this class: unknown keys are errors.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    loss_type: str | tuple[str, ...] = "sigmoid"  # names of `catalog.PREFERENCE_LOSSES`
    loss_weights: tuple[float, ...] | None = None  # one for each loss of the sum; None: all 1
    beta: float | None = None  # None: the usual value of the first loss, 0.1 for most
    label_smoothing: float = 0.0  # the share of pairs believed to be labelled the wrong way round
    gamma: float = 0.5  # simpo: the margin that every pair must keep, in units of beta × log-probability
    desirable_weight: float = 1.0  # kto: λ_D
    undesirable_weight: float = 1.0  # kto: λ_U
    cpo_alpha: float = 1.0  # cpo: weight of the chosen completions' likelihood

    def __post_init__(self) -> None:
        for name in self.loss_types:
            if name not in PREFERENCE_LOSSES:
                raise ValueError(
                    f"loss_type = {name!r} is unknown; choose among {', '.join(sorted(PREFERENCE_LOSSES))}"
                )
        self._check_sum()
        self._refuse_unread()
        if self.beta is None:
            object.__setattr__(self, "beta", self._usual_beta())
        self._check_ranges()

    @property
    def loss_types(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def objectives(self) -> tuple[tuple[str, float], ...]:
        """(loss, its weight in the sum)."""
        return tuple(zip(self.loss_types, self.loss_weights or (1.0,) * len(self.loss_types), strict=True))

    @property
    def facts(self) -> tuple[PreferenceFacts, ...]:
        return tuple(PREFERENCE_LOSSES[name] for name in self.loss_types)

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities must be computed."""
        return any(facts.needs_reference for facts in self.facts)

    @property
    def paired(self) -> bool:
        """Whether the data are pairs; otherwise single completions with a label (KTO)."""
        return self.facts[0].paired

    @property
    def couples(self) -> bool:
        """Whether the loss needs all pairs of the step at once."""
        return any(facts.couples for facts in self.facts)

    @property
    def averaged(self) -> bool:
        """Whether the first loss compares log-probabilities per token."""
        return self.facts[0].averaged

    def _check_sum(self) -> None:
        types, weights = self.loss_types, self.loss_weights
        if not types or len(set(types)) < len(types):
            raise ValueError(f"loss_type = {list(types)} must name at least one loss, and each once")
        if weights is not None and (
            len(weights) != len(types) or not all(math.isfinite(weight) and weight > 0 for weight in weights)
        ):
            raise ValueError(
                f"loss_weights = {list(weights)} must be one number above zero for each of loss_type = "
                f"{list(types)}"
            )
        if len({facts.paired for facts in self.facts}) > 1:
            raise ValueError(
                f"loss_type = {list(types)} mixes kto, which reads single labelled completions, with losses "
                "of pairs; train with one kind"
            )

    def _refuse_unread(self) -> None:
        read = frozenset().union(*(facts.fields for facts in self.facts))
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _LOSS_SPECIFIC - read and value != f.default:
                raise ValueError(
                    f"{f.name} = {value} is not read by loss_type = {self.loss_type!r}; leave it out"
                )

    def _usual_beta(self) -> float:
        usual = {facts.beta for facts in self.facts if facts.beta is not None}
        if len(usual) > 1:
            raise ValueError(
                f"beta is missing: the usual values of {list(self.loss_types)} differ ({sorted(usual)}), and "
                "the losses of a sum share one; give it"
            )
        return usual.pop() if usual else 1.0

    def _check_ranges(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ValueError(
                f"beta = {self.beta} must be above zero: at zero the policy does not enter the loss"
            )
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} is out of range; give a finite number, zero or more")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} must lie in [0, 0.5): at a half the labels say "
                "nothing, and above it they are better swapped"
            )
