"""Catalog and configuration of the losses of fixed completions; formulas: `pairs.py` and `ranking.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, Literal

from grpo_fast.objective.config import AS_WRITTEN, check_fields, option, refuse_unread


@dataclass(frozen=True)
class PreferenceFacts:
    """One row of the catalog."""

    paper: str
    fields: frozenset[str] = frozenset()  # configuration fields that not every loss reads
    beta: float | None = 0.1  # the usual value; None: the loss has no beta
    needs_reference: bool = True
    averaged: bool = False  # log-probabilities per token instead of per sequence
    paired: bool = True  # chosen and rejected completions of one prompt
    takes_margins: bool = True


_EPSILON = frozenset({"label_smoothing"})
_WEIGHTS = frozenset({"desirable_weight", "undesirable_weight"})
_alone = partial(PreferenceFacts, needs_reference=False)

PREFERENCE_LOSSES: dict[str, PreferenceFacts] = {
    "sigmoid": PreferenceFacts("DPO, arXiv 2305.18290, eq. 7"),
    "cdpo": PreferenceFacts("Mitchell 2023, A note on DPO with noisy preferences", _EPSILON),
    "robust": PreferenceFacts("Provably robust DPO, arXiv 2403.00409", _EPSILON),
    "ipo": PreferenceFacts("IPO, arXiv 2310.12036, eq. 17, on log-ratios per token", averaged=True),
    "hinge": PreferenceFacts("RSO, arXiv 2309.06657: SLiC's hinge on normalized likelihoods"),
    "kto": PreferenceFacts("KTO, arXiv 2402.01306", _WEIGHTS, paired=False, takes_margins=False),
    "simpo": _alone("SimPO, arXiv 2405.14734, eq. 6", _EPSILON | {"gamma"}, beta=2.0, averaged=True),
    "orpo": _alone("ORPO, arXiv 2403.07691, eq. 7; beta is its λ", averaged=True),
    "cpo": _alone(
        "CPO, arXiv 2401.08417, eq. 3, and the likelihood of the chosen completions", _EPSILON | {"cpo_alpha"}
    ),
    "sft": _alone("likelihood of the chosen completions, as in TRL", beta=None, takes_margins=False),
}

CUSTOM = PreferenceFacts("a function of the user's own: always with a reference", frozenset({"columns"}))
_LOSS_SPECIFIC = CUSTOM.fields | frozenset[str]().union(
    *(facts.fields for facts in PREFERENCE_LOSSES.values())
)


def label_of(loss_type: str) -> str:
    """Return the name of a loss in metrics: for a custom loss, its function's name."""
    return loss_type.rpartition(":")[2].partition("@")[0]


@dataclass(frozen=True)
class PreferenceLossConfig:
    """One loss, or a weighted sum of several, and its constants, or ValueError for a contradiction.

    Leave fields alone that none of the losses reads. After construction `beta`, the factor on the log-ratio
    of policy to reference, holds the value in force. A bonus for correctness is a margin of its pair, which
    beta does not multiply.
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    loss_type: str | list[str] | tuple[str, ...] = option(
        "sigmoid", "one loss, or a list for their weighted sum; `module:function` is a custom one"
    )
    loss_weights: list[float] | tuple[float, ...] | None = option(None, "one per loss; null: all 1")
    columns: list[str] | tuple[str, ...] = option((), "custom loss: numeric columns, in scores.columns")
    beta: float | None = option(None, "weight of the log-ratio; null: the loss's usual, mostly 0.1", gt=0)
    label_smoothing: float = option(0.0, "share of pairs with swapped labels, in [0, 0.5)", ge=0, lt=0.5)
    gamma: float = option(0.5, "simpo: margin of every pair, in units of beta x log-probability", ge=0)
    desirable_weight: float = option(1.0, "kto: weight of desirable completions", ge=0)
    undesirable_weight: float = option(1.0, "kto: weight of undesirable completions", ge=0)
    cpo_alpha: float = option(1.0, "cpo: weight of the chosen completions' likelihood", ge=0)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "columns", tuple(self.columns))
        for name in self.loss_types:
            if name in ("aot", "aot_unpaired"):
                raise ValueError(f"loss_type = {name!r} was removed; use 'sigmoid', DPO's own")
            if name not in PREFERENCE_LOSSES and ":" not in name:
                known = ", ".join(sorted(PREFERENCE_LOSSES))
                raise ValueError(f"loss_type = {name!r} is unknown; choose among {known}, or module:function")
        self._check_sum()
        if len({*self.columns}) < len(self.columns):
            raise ValueError(f"columns = {list(self.columns)} names one twice; name each once")
        read = frozenset[str]().union(*(facts.fields for facts in self.facts))
        refuse_unread(self, _LOSS_SPECIFIC - read, f"by loss_type = {self.loss_type!r}")
        if self.beta is None:
            usual = {facts.beta for facts in self.facts if facts.beta is not None}
            if len(usual) > 1:
                raise ValueError(
                    f"beta is missing: the losses' usual values differ ({sorted(usual)}); set it"
                )
            object.__setattr__(self, "beta", usual.pop() if usual else 1.0)

    @property
    def loss_types(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def objectives(self) -> tuple[tuple[str, float], ...]:
        """(loss, its weight in the sum)."""
        return tuple(zip(self.loss_types, self.loss_weights or (1.0,) * len(self.loss_types), strict=True))

    @property
    def facts(self) -> tuple[PreferenceFacts, ...]:
        return tuple(PREFERENCE_LOSSES.get(name, CUSTOM) for name in self.loss_types)

    @property
    def needs_reference(self) -> bool:
        return any(facts.needs_reference for facts in self.facts)

    @property
    def paired(self) -> bool:
        """Whether the data are pairs; otherwise single completions with a label (KTO)."""
        return self.facts[0].paired

    @property
    def averaged(self) -> bool:
        """Whether the first loss compares log-probabilities per token."""
        return self.facts[0].averaged

    def check_margins(self) -> None:
        """Raise ValueError if no loss takes margins."""
        if not any(facts.takes_margins for facts in self.facts):
            raise ValueError(f"loss_type = {self.loss_type!r} has no place for margins; leave them out")

    def _check_sum(self) -> None:
        types, weights = self.loss_types, self.loss_weights
        if not types or len({label_of(name) for name in types}) < len(types):
            raise ValueError(f"loss_type = {list(types)} must name at least one loss, and each once")
        if weights is not None and (
            len(weights) != len(types) or not all(math.isfinite(weight) and weight > 0 for weight in weights)
        ):
            raise ValueError(f"loss_weights = {list(weights)}: give one number above 0 for each loss_type")
        if len({facts.paired for facts in self.facts}) > 1:
            raise ValueError(f"loss_type = {list(types)} mixes kto with losses of pairs; train with one kind")


RankingObjective = Literal["plackett_luce", "group_relative", "pairwise", "advantage", "advantage_likelihood"]

# Fields that each objective reads.
_READS = {
    "plackett_luce": {"score", "length_normalised", "temperature"},
    "group_relative": {"score", "temperature"},
    "pairwise": {"score", "length_normalised", "temperature"},
    "advantage": {"epsilon_low", "epsilon_high"},
    "advantage_likelihood": {"length_normalised", "temperature"},
}


@dataclass(frozen=True)
class RankingLossConfig:
    """Which objective, and its constants, or ValueError for a field that the objective does not read.

    | objective | what it does |
    |---|---|
    | `plackett_luce` | likelihood of the whole order, ties included, under scores divided by `temperature` |
    | `group_relative` | `plackett_luce` of scores per token, for which a temperature of 0.1 is usual |
    | `pairwise` | logistic loss of every two responses of different rank |
    | `advantage` | standardized ranks as advantages, clipped ratio to the policy that wrote the responses |
    | `advantage_likelihood` | likelihood of each response, weighted by exp(advantage / `temperature`) |
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    objective: RankingObjective = option("plackett_luce", "of the order, of pairs, or of ranks as advantages")
    score: Literal["logratio", "logprob"] = option("logratio", "with or without the reference model")
    length_normalised: bool = option(False, "scores are per token")
    temperature: float | None = option(
        None,
        "divides scores, as 1 / beta of DPO; null: 10, 1 for scores per token, 0.1 for group_relative",
        gt=0,
    )
    epsilon_low: float = option(0.2, "advantage: how far the ratio may fall below 1 in a whole run", gt=0)
    epsilon_high: float = option(0.2, "advantage: how far it may rise above 1", gt=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.objective not in _READS:
            raise ValueError(f"objective = {self.objective!r} is unknown; choose among {', '.join(_READS)}")
        unread = {f.name for f in fields(self)} - _READS[self.objective] - {"objective"}
        refuse_unread(self, unread, f"by objective = {self.objective!r}")
        if self.temperature is None and self.objective != "advantage":
            summed = self.objective != "advantage_likelihood" and not self.per_token
            usual = 0.1 if self.objective == "group_relative" else 10.0 if summed else 1.0
            object.__setattr__(self, "temperature", usual)

    @property
    def needs_reference(self) -> bool:
        if self.objective == "advantage":
            return True
        return self.score == "logratio" and self.objective != "advantage_likelihood"

    @property
    def per_token(self) -> bool:
        """Whether scores are divided by a response's tokens."""
        return self.length_normalised or self.objective == "group_relative"

    @property
    def averaged(self) -> bool:
        """Whether training moves log-probabilities per token."""
        return self.per_token or self.objective == "advantage"
