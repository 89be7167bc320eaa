"""The configuration that chooses a policy loss and its constants."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from grpo_fast.objective.catalog import (
    CATALOG,
    DISTILLATION,
    LOSS_TYPES,
    Aggregation,
    KLEstimator,
    LossFacts,
    RatioLevel,
    loss_specific,
)

ImportanceLevel = Literal["token", "sequence", "sequence_token"]
SamplerCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask",
    "geometric_truncate", "geometric_mask",
]  # fmt: skip
_CUSTOM = ("columns", "whole_groups")  # fields that only a custom loss reads
LARGEST = 2**31 - 1  # the largest integer that torch, NumPy and vLLM all accept

# `__pydantic_config__` of the dataclasses that are sections of the configuration, where pydantic reads it.
AS_WRITTEN = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "greater than or equal to"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "less than or equal to"),
    "lt": (operator.lt, "less than"),
}


def option(default: Any, description: str, **bounds: float) -> Any:
    """Return a dataclass field with a description for the reference, and bounds by pydantic's names."""
    return field(default=default, metadata={"description": description, **bounds})


def refuse_unread(section: Any, names: Iterable[str], why: str, place: str = "") -> None:
    """Raise ValueError for a field, which nothing reads, with another value than its default.

    Args:
        section: a dataclass, or a pydantic model of the configuration.
        place: the section's key, for the message.
    """
    known: Any = getattr(type(section), "model_fields", None) or type(section).__dataclass_fields__
    for name in names:
        if (value := getattr(section, name)) not in (known[name].default, None):
            key, shown = f"{place}.{name}" if place else name, f" = {value!r}"
            if inner := getattr(type(value), "model_fields", getattr(value, "__dataclass_fields__", None)):
                refuse_unread(value, inner, why, key)
            raise ValueError(f"{key}{shown if len(shown) <= 70 else ''} is not read {why}; leave it out")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(config: Any) -> None:
    """Raise ValueError for a dataclass field of a wrong type, not finite, or out of its bounds."""
    for f in fields(config):
        kind: Any = type(config)
        value, hint = getattr(config, f.name), _hints(kind)[f.name]
        if not _is_a(value, hint):
            raise ValueError(f"{f.name} = {value!r}: should be {_described(hint)}")
        for name, (holds, text) in _BOUNDS.items():
            bound = f.metadata.get(name)
            if bound is not None and value is not None and not holds(value, bound):
                raise ValueError(f"{f.name} = {value!r}: should be {text} {bound}")


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether pydantic's strict mode would accept a value as this type."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_a(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind in (tuple, list):
        return isinstance(value, kind) and all(_is_a(item, inner[0]) for item in value)
    if hint in (int, float):
        number = isinstance(value, Real if hint is float else Integral) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return isinstance(value, hint)


def _described(hint: Any) -> str:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_described, inner)))
    if kind is Literal:
        return ", ".join(map(repr, inner))
    if kind in (tuple, list):
        return f"a list, each {_described(inner[0])}"
    words = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false"}
    return words.get(hint, "None")


@dataclass(frozen=True)
class GRPOLossConfig:
    """Which loss, and its constants, or ValueError for a value out of range or a contradiction.

    Leave fields alone that the chosen loss does not read. After construction `epsilon_low` and `epsilon_high`
    hold the values in force.
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    loss_type: str = option("dapo", "a name of the catalog, or `module:function` for a custom loss")
    columns: tuple[str, ...] | list[str] = option(
        (), "custom loss: numeric dataset columns, or what a reward logs by log_extra, in inputs.columns"
    )
    whole_groups: bool = option(True, "custom loss: keep each group in one micro-batch")
    value_loss_coef: float = option(0.0, "only 0: there is no critic, a group's mean reward is the baseline")
    epsilon_low: float | None = option(None, "fall of the ratio below 1; null: the loss's, mostly 0.2", ge=0)
    epsilon_high: float | None = option(
        None, "rise of the ratio above 1; null: as epsilon_low, else the loss's; cispo: the ceiling", ge=0
    )
    delta: float | None = option(None, "ceiling of the ratio for negative advantages (dual clip)", gt=0)
    aggregation: Aggregation | None = option(None, "a token's weight (docs/methods.md); null: the loss's own")
    importance_sampling_level: ImportanceLevel | None = option(None, "of the ratio; null: the loss's own")
    max_completion_length: int | None = option(
        None, "tokens, for aggregation constant_length; null: rollout.max_completion_length", gt=0, le=LARGEST
    )

    beta: float = option(0.0, "weight of the KL to the reference model; 0: none, and no reference", ge=0)
    kl_estimator: KLEstimator | None = option(
        None,
        "k1: log-ratio, k2: half its square, k3: unbiased and positive, exact: the KL of the whole "
        "distributions; null: the loss's own, mostly k3",
    )
    kl_in_reward: bool = option(False, "subtract the KL from the reward instead of adding it to the loss")
    use_bias_correction_kl: bool = option(False, "KL times the ratio, so that its gradient is unbiased")

    entropy_coef: float = option(0.0, "bonus: minus this times the mean entropy of a token", ge=0)
    use_adaptive_entropy: bool = option(False, "entropy_coef follows entropy_target (Skywork-OR1)")
    entropy_target: float = option(0.2, "nats a token; adaptive: the bonus acts at or below it", ge=0)
    entropy_coef_min: float = option(0.0, "adaptive: smallest entropy_coef", ge=0)
    entropy_coef_max: float = option(1.0, "adaptive: largest entropy_coef", ge=0)
    entropy_coef_delta: float = option(0.005, "adaptive: change of entropy_coef per optimizer step", gt=0)
    top_entropy_quantile: float = option(
        1.0, "share of a micro-batch's tokens, highest entropy first, that the policy term keeps", ge=0, le=1
    )

    off_policy_mask_threshold: float | None = option(
        None, "nats a token to the old policy that mask a completion of negative advantage; null: never", gt=0
    )
    sampler_correction: SamplerCorrection | None = option(
        None,
        "of the policy's ratio to the sampler: at which level, and what happens beyond bounds; null: "
        "sequence_mask where vLLM samples (vespo: token_truncate), else none",
    )
    sampler_clip_min: float | None = option(None, "lower bound of that ratio; null: none", gt=0)
    sampler_clip_max: float | None = option(3.0, "upper bound of that ratio; null: none", gt=0)

    sapo_temperature_pos: float = option(1.0, "sapo: of the gate for positive advantages", gt=0)
    sapo_temperature_neg: float = option(1.05, "sapo: of the gate for negative advantages", gt=0)
    vespo_k_pos: float = option(2.0, "vespo: exponent of the weight for positive advantages", ge=0)
    vespo_lambda_pos: float = option(3.0, "vespo: decay of the weight for positive advantages", gt=0)
    vespo_k_neg: float = option(3.0, "vespo: exponent for negative advantages", ge=0)
    vespo_lambda_neg: float = option(2.0, "vespo: decay for negative advantages", gt=0)
    clip_cov_ratio: float = option(2e-4, "clip_cov: share of tokens whose gradient is dropped", gt=0, le=1)
    clip_cov_low: float = option(1.0, "clip_cov: they are sampled from covariances above it")
    clip_cov_high: float = option(5.0, "clip_cov: and below it")
    kl_cov_ratio: float = option(2e-4, "kl_cov: share of tokens that are penalized", gt=0, le=1)
    kl_cov_coef: float = option(1.0, "kl_cov: weight of the penalty", gt=0)
    jsd_beta: float = option(
        1.0, "opd: 1 is KL(policy ‖ reference), 0 the forward KL, between: generalized JSD", ge=0, le=1
    )
    dppo_ratio_max: float = option(20.0, "dppo: ceiling of the ratio that multiplies the gradient", gt=0)
    dro_beta: float = option(0.05, "dro: weight of half the squared log-ratio to the old policy", gt=0)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "columns", tuple(self.columns))  # YAML's list equals the default
        if self.is_custom:
            self._check_custom()
        elif self.loss_type not in CATALOG | DISTILLATION:
            known = ", ".join((*LOSS_TYPES, *DISTILLATION))
            raise ValueError(
                f"loss_type = {self.loss_type!r} is unknown; choose one of {known}, or module:function"
            )
        else:
            self._resolve()
        self._check_ranges()

    @property
    def is_custom(self) -> bool:
        """Whether `loss_type` is a user's own function."""
        return ":" in self.loss_type

    @property
    def facts(self) -> LossFacts:
        """The catalog's row. A custom loss has none (KeyError)."""
        return CATALOG[self.loss_type] if self.loss_type in CATALOG else DISTILLATION[self.loss_type]

    @property
    def distills(self) -> bool:
        """Whether the loss is only the divergence to the reference, without advantages."""
        return self.loss_type in DISTILLATION

    @property
    def ratio_level(self) -> RatioLevel:
        return self.importance_sampling_level or self.facts.choosable_levels[0]

    @property
    def aggregation_kind(self) -> Aggregation:
        return self.aggregation or self.facts.aggregation

    @property
    def reads_length(self) -> bool:
        """Whether `max_completion_length` is part of the loss."""
        return self.is_custom or self.aggregation_kind == "constant_length"

    @property
    def kl_kind(self) -> KLEstimator:
        return self.kl_estimator or self.facts.kl_estimator

    @property
    def weighs_sampler(self) -> bool:
        return not self.is_custom and self.facts.weighs_sampler

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0 or self.distills

    @property
    def compares_heads(self) -> bool:
        """Whether the loss reads the reference's hidden states and head instead of its log-probabilities."""
        return self.needs_exact_kl or self.distills

    @property
    def needs_exact_kl(self) -> bool:
        """Whether the loss reads `LossInputs.exact_kl` instead of `ref_logprobs`."""
        return self.needs_reference and not self.is_custom and self.kl_kind == "exact"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0 or self.use_adaptive_entropy or self.top_entropy_quantile < 1

    @property
    def reads_every_token(self) -> bool:
        """Whether a token without an advantage may change the loss: by KL, penalty, entropy or covariance."""
        in_loss = self.needs_reference and not self.kl_in_reward
        if self.is_custom or in_loss or self.needs_entropy:
            return True
        return self.facts.moves_without_advantage or "covariance" in self.facts.cuts

    @property
    def needs_sampler(self) -> bool:
        """Whether the loss cannot do without `LossInputs.sampler_logprobs`."""
        return self.sampler_correction not in (None, "none")

    @property
    def reads_sampler(self) -> bool:
        """Whether `LossInputs.sampler_logprobs`, if given, change the loss."""
        return self.needs_sampler or self.off_policy_mask_threshold is not None or self.is_custom

    def _resolve(self) -> None:
        facts, name = self.facts, f"loss_type = {self.loss_type!r}"
        refuse_unread(self, _CUSTOM, f"by {name}, only by a custom loss")
        unread = loss_specific().difference(facts.fields)
        if self.distills:
            read = {"loss_type", "aggregation", "max_completion_length", "value_loss_coef", *facts.fields}
            unread = frozenset(f.name for f in fields(self)) - read
        refuse_unread(self, unread, f"by {name}")
        if facts.epsilon is not None:
            low, high = facts.epsilon if self.epsilon_low is None else (self.epsilon_low, self.epsilon_low)
            object.__setattr__(self, "epsilon_low", low)
            object.__setattr__(self, "epsilon_high", high if self.epsilon_high is None else self.epsilon_high)
        if self.importance_sampling_level not in (None, *facts.choosable_levels):
            raise ValueError(
                f"importance_sampling_level = {self.importance_sampling_level!r} contradicts {name}, whose "
                f"paper fixes the ratio ({', '.join(facts.choosable_levels)}); leave it out, or choose "
                "loss_type='gspo' for a sequence-level ratio"
            )
        if self.beta != 0 and facts.forbids_kl:
            raise ValueError(f"beta = {self.beta} with {name}: {facts.forbids_kl}, or set beta = 0")
        level = (self.sampler_correction or "none").partition("_")[0]
        if self.weighs_sampler and level not in ("none", "token"):
            raise ValueError(
                f"sampler_correction = {self.sampler_correction!r} contradicts {name}, which multiplies "
                "token ratios into its own sequence weight; use 'token_truncate', 'token_mask' or 'none'"
            )

    def _check_custom(self) -> None:
        given = {"loss_type", "beta", "max_completion_length", "value_loss_coef", *_CUSTOM}
        others = {f.name for f in fields(self)} - given
        refuse_unread(self, others, "by a custom loss, which gets LossInputs only")
        if len({*self.columns}) < len(self.columns):
            raise ValueError(f"columns = {list(self.columns)} names one twice; name each once")

    def _check_ranges(self) -> None:
        if self.value_loss_coef:
            raise ValueError(f"value_loss_coef = {self.value_loss_coef}: there is no critic; set it to 0")
        if self.kl_estimator == "exact" and (self.kl_in_reward or self.use_bias_correction_kl):
            given = "kl_in_reward" if self.kl_in_reward else "use_bias_correction_kl"
            raise ValueError(f"{given} = True needs kl_estimator k1, k2 or k3, not 'exact'; set it to false")
        if self.kl_in_reward and self.use_bias_correction_kl:
            raise ValueError("use_bias_correction_kl and kl_in_reward exclude each other; set one to false")
        if self.needs_sampler and self.sampler_clip_min is None and self.sampler_clip_max is None:
            given = f"sampler_correction = {self.sampler_correction!r}"
            raise ValueError(f"{given} needs sampler_clip_min or sampler_clip_max; set at least one")
        high, ceiling = self.epsilon_high, 1 + (self.epsilon_high or 0.0)
        if not self.is_custom and self.facts.absolute_ceiling and ceiling <= 2:
            raise ValueError(
                f"epsilon_high = {high} would bound every weight of loss_type = {self.loss_type!r}, whose "
                f"ceiling is absolute here; what verl writes as {high} is {ceiling}"
            )
        if self.delta is not None and self.delta <= ceiling:
            given = f"delta = {self.delta}"
            raise ValueError(f"{given} must exceed 1 + epsilon_high = {ceiling}; raise delta or leave it out")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min = {self.entropy_coef_min} exceeds entropy_coef_max = "
                f"{self.entropy_coef_max}; swap them"
            )
        for lower, upper in (("clip_cov_low", "clip_cov_high"), ("sampler_clip_min", "sampler_clip_max")):
            low, high = getattr(self, lower), getattr(self, upper)
            if low is not None and high is not None and low >= high:
                raise ValueError(f"{lower} = {low} must be below {upper} = {high}; lower it")
