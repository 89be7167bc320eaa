"""The policy loss a run asks for. Names are TRL's where TRL has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from grpo_fast.objective.catalog import CATALOG, LOSS_TYPES, KLEstimator, LossFacts, RatioLevel

ImportanceLevel = Literal["token", "sequence", "sequence_token"]
SamplerCorrection = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]

# Fields that not every loss reads.
_LOSS_SPECIFIC = frozenset().union(*(facts.fields for facts in CATALOG.values()))

_NOT_NEGATIVE = (
    *("epsilon_low", "epsilon_high", "beta", "vespo_k_pos", "vespo_k_neg", "value_coef"),
    *("entropy_coef", "entropy_target", "entropy_coef_min", "entropy_coef_max"),
)
_POSITIVE = (
    *("delta", "max_completion_length", "off_policy_mask_threshold", "sampler_clip_min", "sampler_clip_max"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    *("clip_cov_ratio", "kl_cov_ratio", "kl_cov_coef", "dppo_ratio_max", "entropy_coef_delta"),
)
_SHARES = ("top_entropy_quantile", "clip_cov_ratio", "kl_cov_ratio")


@dataclass(frozen=True)
class GRPOLossConfig:
    """Which loss, and its constants.

    A field that the chosen loss does not read must be left alone; `epsilon_low` and `epsilon_high` hold
    the values in force once the configuration is made.

    Raises:
        ValueError: a value out of its range, or contradicting another; the message names the field, the
            value and the remedy.
    """

    # pydantic reads this when the root configuration holds this class: unknown keys are errors.
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    loss_type: str = "dapo"  # a name of `catalog.CATALOG`, or `module:function` of one's own
    epsilon_low: float | None = None  # None: the paper's value for this loss, 0.2 for most
    epsilon_high: float | None = None  # None: as epsilon_low if given, else the paper's; cispo: absolute
    delta: float | None = None  # two-sided (dual) clip: ceiling of the ratio where the advantage is negative
    importance_sampling_level: ImportanceLevel | None = None  # None: the loss's own
    max_completion_length: int | None = None  # dr_grpo's constant length

    beta: float = 0.0  # weight of the KL to the reference model; 0 needs no reference
    kl_estimator: KLEstimator | None = None  # None: the loss's own, k3 for most
    kl_in_reward: bool = False  # the trainer takes it from the reward (`kl_penalty`); the loss has no KL term
    use_bias_correction_kl: bool = False  # KL term times π_θ/π_old, so that its gradient is unbiased

    entropy_coef: float = 0.0  # bonus: minus this times the mean token entropy
    use_adaptive_entropy: bool = False  # entropy_coef is only the start; see `entropy.EntropyController`
    entropy_target: float = 0.2  # nats; adaptive: the bonus acts at or below it
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005  # adaptive: change of entropy_coef per optimiser step
    top_entropy_quantile: float = 1.0  # share of tokens, highest entropy first, that the policy term keeps

    off_policy_mask_threshold: float | None = None  # nats a token; drops negative sequences beyond it
    sampler_correction: SamplerCorrection = "none"  # π_old/π_sampler: at which level, what beyond bounds
    sampler_clip_min: float | None = None
    sampler_clip_max: float | None = 3.0

    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    clip_cov_ratio: float = 2e-4  # share of tokens whose gradient is dropped
    clip_cov_low: float = 1.0  # they are drawn from covariances within these bounds
    clip_cov_high: float = 5.0
    kl_cov_ratio: float = 2e-4  # share of tokens, highest covariance first, that are penalised
    kl_cov_coef: float = 1.0
    dppo_ratio_max: float = 20.0  # ceiling of the ratio that multiplies the gradient

    value_coef: float = 0.0  # weight of a value head's squared error, for those who bring one

    def __post_init__(self) -> None:
        if self.is_custom:
            self._check_custom()
        elif self.loss_type not in CATALOG:
            raise ValueError(
                f"loss_type = {self.loss_type!r} is unknown; choose one of {', '.join(LOSS_TYPES)}, or give "
                "your own function as 'module:function'"
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
        """The catalogue's row. A custom loss has none (KeyError)."""
        return CATALOG[self.loss_type]

    @property
    def ratio_level(self) -> RatioLevel:
        """The level of the importance ratio in force."""
        return self.importance_sampling_level or self.facts.level

    @property
    def kl_kind(self) -> KLEstimator:
        """The KL estimator in force."""
        return self.kl_estimator or self.facts.kl_estimator

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities must be computed."""
        return self.beta > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `LossInputs.entropy` must be there."""
        return self.differentiates_entropy or self.top_entropy_quantile < 1

    @property
    def differentiates_entropy(self) -> bool:
        """Whether the loss has a gradient in the entropy, and not only a use for its value."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def needs_sampler(self) -> bool:
        """Whether `LossInputs.sampler_logprobs` must be there."""
        return self.sampler_correction != "none"

    def _resolve(self) -> None:
        facts = self.facts
        self._refuse_unread(_LOSS_SPECIFIC - facts.fields, f"is not read by loss_type = {self.loss_type!r}")
        if facts.epsilon is not None:
            low, high = facts.epsilon
            given = self.epsilon_low is not None
            object.__setattr__(self, "epsilon_low", self.epsilon_low if given else low)
            if self.epsilon_high is None:
                object.__setattr__(self, "epsilon_high", self.epsilon_low if given else high)
        if self.importance_sampling_level not in (None, *facts.choosable_levels):
            allowed = ", ".join(repr(level) for level in facts.choosable_levels) or "none"
            raise ValueError(
                f"importance_sampling_level = {self.importance_sampling_level!r} contradicts loss_type = "
                f"{self.loss_type!r}, whose ratio is fixed by its paper (allowed: {allowed}); leave it out, "
                "or choose loss_type='gspo' for a sequence-level ratio"
            )
        if self.beta != 0 and facts.forbids_kl:
            raise ValueError(
                f"beta = {self.beta} with loss_type = {self.loss_type!r}: {facts.forbids_kl}, or set beta = 0"
            )
        level = self.sampler_correction.partition("_")[0]
        if self.loss_type == "vespo" and level not in ("none", "token"):
            raise ValueError(
                f"sampler_correction = {self.sampler_correction!r} contradicts loss_type = 'vespo', which "
                "multiplies token ratios into a sequence weight of its own; use 'token_truncate', "
                "'token_mask' or 'none'"
            )

    def _check_custom(self) -> None:
        module, _, function = self.loss_type.partition(":")
        if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ValueError(
                f"loss_type = {self.loss_type!r} is not an import path; write it as 'package.module:function'"
            )
        everything = {f.name for f in fields(self)} - {"loss_type", "beta", "max_completion_length"}
        self._refuse_unread(everything, "is not read by a loss of your own, which gets LossInputs only")

    def _refuse_unread(self, names: frozenset[str] | set[str], why: str) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in names and value != f.default:
                raise ValueError(f"{f.name} = {value} {why}; leave it out")

    def _check_ranges(self) -> None:
        self._check_each(_NOT_NEGATIVE, lambda value: value >= 0, "give a finite number, zero or more")
        self._check_each(_POSITIVE, lambda value: value > 0, "give a finite number above zero")
        self._check_each(_SHARES, lambda value: 0 <= value <= 1, "give a share between 0 and 1")
        if self.delta is not None and self.delta <= 1 + self.epsilon_high:
            raise ValueError(
                f"delta = {self.delta} must exceed 1 + epsilon_high = {1 + self.epsilon_high}, or it undoes "
                "the clip; raise delta or leave it out"
            )
        if self.kl_in_reward and self.use_bias_correction_kl:
            raise ValueError(
                "use_bias_correction_kl = True corrects the gradient of a KL in the loss, but kl_in_reward = "
                "True takes it from the reward; set one of them to false"
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min = {self.entropy_coef_min} exceeds entropy_coef_max = "
                f"{self.entropy_coef_max}; swap them"
            )
        if self.clip_cov_low >= self.clip_cov_high:
            raise ValueError(
                f"clip_cov_low = {self.clip_cov_low} must be below clip_cov_high = {self.clip_cov_high}; "
                "lower it"
            )
        self._check_sampler_bounds()

    def _check_each(self, names: tuple[str, ...], holds: Callable[[float], bool], remedy: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and holds(value)):
                raise ValueError(f"{name} = {value} is out of range; {remedy}")

    def _check_sampler_bounds(self) -> None:
        low, high = self.sampler_clip_min, self.sampler_clip_max
        if self.needs_sampler and low is None and high is None:
            raise ValueError(
                f"sampler_correction = {self.sampler_correction!r} has no bound: sampler_clip_min and "
                "sampler_clip_max are both null; set at least one"
            )
        if low is not None and high is not None and low >= high:
            raise ValueError(f"sampler_clip_min = {low} must be below sampler_clip_max = {high}; lower it")
