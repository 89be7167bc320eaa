"""The policy losses by name, with the papers that define them, and the configuration that chooses one.

A policy loss is a sum over tokens of  weight × (surrogate + β · KL).  The surrogate is a function in
`surrogates.py`, the weight comes from the aggregation, the ratio from its level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from grpo_fast.lookup import OBJECT_MARK
from grpo_fast.section import EXACT, LARGEST

Settings = dict[str, Any]  # values by key of the configuration, such as "loss.beta"
Aggregation = Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"]
RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
KLEstimator = Literal["k1", "k2", "k3"]
ImportanceLevel = Literal["token", "sequence", "sequence_token"]
SamplerCorrection = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask",
    "geometric_truncate", "geometric_mask",
]  # fmt: skip


Bounds = tuple[float, float, float]  # as `LossConstants` has them: low, high, cap


@dataclass(frozen=True)
class LossFacts:
    """One row of the catalogue: a policy loss, and what its paper sets beside it where it is a method."""

    paper: str
    aggregation: Aggregation
    surrogate: str  # a function of `surrogates.py`, or `module:function` of one's own
    cuts: tuple[str, ...] = ()  # where it cuts a ratio: the metrics clip_ratio/*
    fused: Callable[[GRPOLossConfig], Bounds] | None = None  # of the kernel's branch of that name; None: none
    epsilon: tuple[float | None, float | None] | None = None  # (low, high) by default; None: no clipping
    absolute_ceiling: bool = False  # epsilon_high is the ceiling of the ratio itself
    weighs_sampler: bool = False  # the sampler's token ratios go into a sequence weight of its own
    fields: tuple[str, ...] = ()  # of the configuration, that not every loss reads
    choosable_levels: tuple[RatioLevel, ...] = ("token",)  # of the importance ratio; the first by default
    kl_estimator: KLEstimator = "k3"
    forbids_kl: str = ""  # why a KL term is refused
    holds_back: bool = False  # tokens of the step whose covariance is high, see `surrogates.held_back`
    advantages: str = "reward minus the group's mean, divided by the group's standard deviation"
    estimator: Settings = field(default_factory=dict)  # what makes them of rewards, keys of the configuration
    sets: Settings = field(default_factory=dict)  # the method's other settings


def _clip_bounds(config: GRPOLossConfig) -> Bounds:
    """Of the log-ratio."""
    low, high = config.epsilon_low or 0.0, config.epsilon_high or 0.0
    cap = math.inf if config.delta is None else math.log(config.delta)
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high), cap


def _plain_bounds(config: GRPOLossConfig) -> Bounds:
    """Of the ratio itself, or of the divergence."""
    return config.epsilon_low or 0.0, config.epsilon_high or 0.0, config.dppo_ratio_max


def _sapo_bounds(config: GRPOLossConfig) -> Bounds:
    """Its two temperatures."""
    return config.sapo_temperature_neg, config.sapo_temperature_pos, 0.0


_RANGE = ("epsilon_low", "epsilon_high")
_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_CLIP_COV = ("clip_cov_ratio", "clip_cov_low", "clip_cov_high")
_KL_COV = ("kl_cov_ratio", "kl_cov_coef")
_DPPO = (*_RANGE, "dppo_ratio_max")
_CENTRED = "reward minus the group's mean"
_UNSCALED = {"advantage.scale_rewards": "none"}
_RESAMPLED = {"advantage.dynamic_sampling": True, "advantage.max_draws": 10}
_ANY: tuple[RatioLevel, ...] = ("token", "sequence", "sequence_token")
_clip = partial(
    LossFacts,
    surrogate="clip",
    cuts=("low", "high", "delta"),
    fused=_clip_bounds,
    epsilon=(0.2, 0.2),
    fields=(*_RANGE, "delta"),
    choosable_levels=_ANY,
)
_gspo = partial(_clip, aggregation="sequence_mean", epsilon=(3e-4, 4e-4))
# The settings: verl's examples/dppo_trainer/run_qwen30b_dppo.sh, written by its authors.
_dppo = partial(
    LossFacts,
    aggregation="token_mean",
    cuts=("low", "high"),
    fused=_plain_bounds,
    fields=_DPPO,
    advantages=_CENTRED,
    estimator=_UNSCALED,
    sets={"loss.aggregation": "constant_length", "loss.dppo_ratio_max": 10000, "old_logprobs": "sampler"},
)

# A comment says whose values a row's settings are, where they are not the paper's equations.
CATALOG: dict[str, LossFacts] = {
    # Section 4.2: the KL coefficient; epsilon is not stated there, 0.2 is PPO's.
    "grpo": _clip("DeepSeekMath, arXiv 2402.03300, eq. 3", "sequence_mean", sets={"loss.beta": 0.04}),
    "bnpo": _clip("as in TRL: over a batch what dapo is over a step", "token_mean"),
    # And train_zero_math.py of sail-sg/understand-r1-zero.
    "dr_grpo": _clip(
        "Dr. GRPO, arXiv 2503.20783, section 3.2", "constant_length", advantages=_CENTRED, estimator=_UNSCALED
    ),
    # Section 4.1, and verl's recipe/dapo/run_dapo_qwen2.5_32b.sh.
    "dapo": _clip(
        "DAPO, arXiv 2503.14476, eq. 8",
        "token_mean",
        sets={"loss.epsilon_low": 0.2, "loss.epsilon_high": 0.28}
        | _RESAMPLED
        | {"advantage.soft_overlong": 0.2},
    ),
    "gspo": _gspo("GSPO, arXiv 2507.18071, eq. 5 and 7", choosable_levels=("sequence",)),
    "gspo_token": _gspo("GSPO-token, arXiv 2507.18071, eq. 13 and 14", choosable_levels=("sequence_token",)),
    # As TRL's paper index quotes it; the paper was not readable.
    "luspo": _clip(
        "LUSPO, arXiv 2602.05261",
        aggregation="sequence_sum",
        epsilon=(2e-3, 2.5e-3),
        choosable_levels=("sequence", "sequence_token"),
    ),
    # Appendix C: a beta of 0.03 for TL;DR, 0.1 for Anthropic-HH.
    "rloo": _clip(
        "RLOO, arXiv 2402.14740, section 2.3, with PPO's clip on the ratio of the whole completion",
        aggregation="sequence_mean",
        choosable_levels=("product",),
        advantages="reward, the KL already taken from it, minus the mean of the group's others",
        estimator={"advantage.baseline": "leave_one_out"} | _UNSCALED,
        sets={"loss.beta": 0.03, "loss.kl_estimator": "k1", "loss.kl_in_reward": True},
    ),
    # The rest by OpenRLHF's train_reinforce_baseline_hybrid_engine.sh.
    "reinforce_plus_plus_baseline": _clip(
        "REINFORCE++-baseline, arXiv 2501.03262, eq. 6 to 8",
        aggregation="token_mean",
        kl_estimator="k2",
        advantages=f"{_CENTRED}, whitened over the batch's tokens",
        estimator={"advantage.scale_rewards": "whiten"},
        sets={"loss.beta": 1e-5, "advantage.dynamic_sampling": True},
    ),
    # And scripts/qwen2.5-math-7b-gmpo.sh of callsys/GMPO.
    "gmpo": LossFacts(
        "GMPO, arXiv 2507.20673",
        "sequence_mean",
        "geometric_mean",
        cuts=("low", "high"),
        epsilon=(0.4, 0.4),
        fields=_RANGE,
    ),
    # Section 3.1 of MiniMax-M1; the ceiling is not stated there.
    "cispo": LossFacts(
        "CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the ceiling is absolute as in arXiv 2510.13786",
        aggregation="token_mean",
        surrogate="cispo",
        cuts=("high",),
        fused=_plain_bounds,
        epsilon=(None, 5.0),
        absolute_ceiling=True,
        fields=("epsilon_high",),
        sets={"advantage.dynamic_sampling": True, "advantage.soft_overlong": 0.2},
    ),
    "sapo": LossFacts(
        "SAPO, arXiv 2511.20347, eq. 5 and 6", "sequence_mean", "sapo", fused=_sapo_bounds, fields=_SAPO
    ),
    # And recipe/vespo/run of FloyedShen/VESPO.
    "vespo": LossFacts("VESPO, arXiv 2602.10693", "token_mean", "vespo", weighs_sampler=True, fields=_VESPO),
    "gpg": LossFacts(
        "GPG, arXiv 2504.02546, eq. 5",
        aggregation="token_mean",
        surrogate="reinforce",
        fused=_plain_bounds,
        forbids_kl="GPG is defined without a reference model; use loss_type='reinforce' to add one",
        advantages=f"{_CENTRED}, times B / (B - M), M of the B groups flat",
        estimator=_UNSCALED | {"advantage.rescale_flat_groups": True},  # F_norm = 1, alpha = B / (B - M)
    ),
    # A baseline may not depend on the completion it is for.
    "reinforce": LossFacts(
        "REINFORCE, Williams 1992",
        "sequence_sum",
        "reinforce",
        fused=_plain_bounds,
        advantages="reward minus any baseline",
        estimator={"advantage.baseline": "leave_one_out"} | _UNSCALED,
    ),
    # And recipe/dapo/7b_clip_cov.sh of PRIME-RL/Entropy-Mechanism-of-RL.
    "clip_cov": _clip(
        "Clip-Cov, arXiv 2505.22617, eq. 11 and 12",
        "token_mean",
        surrogate="clip_cov",
        cuts=("low", "high", "covariance"),
        fused=None,
        fields=(*_RANGE, *_CLIP_COV),
        choosable_levels=("token",),
        holds_back=True,
        sets={"loss.epsilon_low": 1.0, "loss.epsilon_high": 1.0} | _RESAMPLED,
    ),
    # And verl's recipe/entropy/7b_kl_cov.sh; 32b_kl_cov.sh has a share of 2e-4.
    "kl_cov": LossFacts(
        "KL-Cov, arXiv 2505.22617, eq. 13 and 14",
        "token_mean",
        "kl_cov",
        cuts=("covariance",),
        fields=_KL_COV,
        holds_back=True,
        sets={"loss.kl_cov_ratio": 2e-3} | _RESAMPLED,
    ),
    "dppo_tv": _dppo("DPPO-Binary-TV, arXiv 2602.04879", surrogate="dppo_tv", epsilon=(0.15, 0.15)),
    "dppo_kl": _dppo("DPPO-Binary-KL, arXiv 2602.04879", surrogate="dppo_kl", epsilon=(0.05, 0.05)),
}

METHODS: dict[str, Settings] = {
    **{name: {"loss.loss_type": name} | facts.sets | facts.estimator for name, facts in CATALOG.items()},
    # Lite PPO, arXiv 2508.08221: the group's mean, the batch's deviation, token-level loss; and ROLL's
    # LitePPO.md.
    "lite_ppo": {"loss.loss_type": "dapo", "advantage.scale_rewards": "batch"},
    # GDPO, arXiv 2601.05242, and verl-GDPO/train_gdpo.sh of NVlabs/GDPO.
    "gdpo": {"loss.loss_type": "dapo", "advantage.multi_objective_aggregation": "normalize_then_sum"},
    # INTELLECT-2, arXiv 2505.07291: prime-rl's configs/training/intellect2_qwq.toml at 3c38caf9; the KL by
    # TRL's paper index.
    "intellect_2": {
        "loss.loss_type": "dapo",
        "loss.delta": 4.0,
        "loss.beta": 0.001,
        "loss.entropy_coef": 0.001,
        "advantage.dynamic_sampling": True,
    },
    # Skywork-OR1, arXiv 2505.22312, sections 3.1 and 3.2.5, and or1_scripts/train/7b_8k.sh of
    # SkyworkAI/Skywork-OR1.
    "skywork_or1": {
        "loss.loss_type": "dapo",
        "loss.use_adaptive_entropy": True,
        "loss.entropy_target": 0.2,
        "loss.entropy_coef_max": 0.005,
        "loss.entropy_coef_delta": 1e-4,
        "advantage.skip_flat_groups": True,
    },
}
"""What each method sets over the defaults: every loss, and those that take another's surrogate."""

LOSS_TYPES = tuple(CATALOG)


def loss_specific(names: Iterable[str] | None = None) -> frozenset[str]:
    """Fields of the configuration that not every loss reads, of these losses or of all."""
    return frozenset[str]().union(*(CATALOG[name].fields for name in names or CATALOG))


def option(default: Any, description: str, **bounds: float) -> Any:
    """A dataclass's field with what the reference of the configuration says of it, and pydantic's bounds."""
    return field(default=default, metadata={"description": description, **bounds})


def refuse_unread(config: Any, names: Iterable[str], why: str) -> None:
    """Raise ValueError when one of a dataclass's fields `names` is not at its default."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in names and value != f.default:
            raise ValueError(f"{f.name} = {value} {why}; leave it out")


@cache
def _fields_of(kind: type) -> type[BaseModel]:
    """Its fields and their bounds without what it does once they are there."""
    hints = get_type_hints(kind)
    given: dict[str, Any] = {f.name: (hints[f.name], Field(**f.metadata)) for f in fields(kind)}
    return create_model(kind.__name__, __config__=ConfigDict(**EXACT, strict=True), **given)


def check_fields(config: Any) -> None:
    """Raise ValueError when a field of a dataclass is of another type, not finite, or beyond its bounds."""
    kind: type = type(config)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(config).items()}
    try:
        _fields_of(kind).model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name, message = str(first["loc"][0]), first["msg"]
        raise ValueError(f"{name} = {given[name]!r}: {message[0].lower()}{message[1:]}") from error


@dataclass(frozen=True)
class GRPOLossConfig:
    """Which loss, and its constants.

    A field that the chosen loss does not read must be left alone; `epsilon_low` and `epsilon_high` hold
    the values in force once the configuration is made.

    Raises:
        ValueError: a value out of its range, or contradicting another; the message names the field, the
            value and the remedy.
    """

    # pydantic reads this when the root configuration holds this class.
    __pydantic_config__: ClassVar[ConfigDict] = EXACT

    loss_type: str = option(
        "dapo", "the policy loss, a name of the catalogue, or `module:function` of one's own"
    )
    epsilon_low: float | None = option(
        None,
        "how far the ratio may fall below 1; null: the catalogue's value for this loss, 0.2 for most",
        ge=0,
    )
    epsilon_high: float | None = option(
        None,
        "how far it may rise above 1; null: as epsilon_low, else the catalogue's; cispo: the ceiling itself",
        ge=0,
    )
    delta: float | None = option(
        None,
        "ceiling of the ratio where the advantage is negative, above 1 + epsilon_high (INTELLECT-2, arXiv "
        "2505.07291; dual clip)",
        gt=0,
    )
    aggregation: Aggregation | None = option(
        None, "a token's weight in the loss, see docs/methods.md; null: the loss's own"
    )
    importance_sampling_level: ImportanceLevel | None = option(
        None, "of the importance ratio; null: the loss's own"
    )
    max_completion_length: int | None = option(
        None,
        "tokens, the length of aggregation constant_length (dr_grpo's); null: rollout.max_completion_length",
        gt=0,
        le=LARGEST,
    )

    beta: float = option(
        0.0, "weight of the KL to the reference model; 0: no KL, and no reference model", ge=0
    )
    kl_estimator: KLEstimator | None = option(
        None, "k1: log-ratio, k2: half its square, k3: unbiased and positive; null: the loss's, mostly k3"
    )
    kl_in_reward: bool = option(False, "the KL is taken from the reward instead of being a term of the loss")
    use_bias_correction_kl: bool = option(
        False, "the KL term times the ratio to the old policy, so that its gradient is unbiased"
    )

    entropy_coef: float = option(0.0, "bonus: minus this times the mean entropy of a token", ge=0)
    use_adaptive_entropy: bool = option(
        False, "entropy_coef is only the start, and then follows entropy_target (Skywork-OR1)"
    )
    entropy_target: float = option(0.2, "nats a token; adaptive: the bonus acts at or below it", ge=0)
    entropy_coef_min: float = option(0.0, "adaptive: entropy_coef at least", ge=0)
    entropy_coef_max: float = option(1.0, "adaptive: entropy_coef at most", ge=0)
    entropy_coef_delta: float = option(0.005, "adaptive: change of entropy_coef in an optimiser step", gt=0)
    top_entropy_quantile: float = option(
        1.0, "share of tokens, highest entropy first, that the policy term keeps", ge=0, le=1
    )

    off_policy_mask_threshold: float | None = option(
        None,
        "nats a token to the old policy, that drop a completion of negative advantage; null: never",
        gt=0,
    )
    sampler_correction: SamplerCorrection | None = option(
        None,
        "of the policy's ratio to the sampler: at which level, and what happens beyond bounds; null: "
        "sequence_mask where vLLM samples (vespo: token_truncate), else none",
    )
    sampler_clip_min: float | None = option(None, "lower bound of that ratio; null: none", gt=0)
    sampler_clip_max: float | None = option(3.0, "upper bound of that ratio; null: none", gt=0)

    sapo_temperature_pos: float = option(1.0, "sapo: of the gate where the advantage is positive", gt=0)
    sapo_temperature_neg: float = option(1.05, "sapo: of the gate where it is negative", gt=0)
    vespo_k_pos: float = option(2.0, "vespo: exponent of the weight where the advantage is positive", ge=0)
    vespo_lambda_pos: float = option(3.0, "vespo: decay of the weight where the advantage is positive", gt=0)
    vespo_k_neg: float = option(3.0, "vespo: exponent where it is negative", ge=0)
    vespo_lambda_neg: float = option(2.0, "vespo: decay where it is negative", gt=0)
    clip_cov_ratio: float = option(2e-4, "clip_cov: share of tokens whose gradient is dropped", gt=0, le=1)
    clip_cov_low: float = option(1.0, "clip_cov: they are drawn from covariances above it")
    clip_cov_high: float = option(5.0, "clip_cov: and below it")
    kl_cov_ratio: float = option(
        2e-4, "kl_cov: share of tokens, highest covariance first, that are penalised", gt=0, le=1
    )
    kl_cov_coef: float = option(1.0, "kl_cov: weight of the penalty", gt=0)
    dppo_ratio_max: float = option(20.0, "dppo: ceiling of the ratio that multiplies the gradient", gt=0)

    def __post_init__(self) -> None:
        check_fields(self)
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
        return self.importance_sampling_level or self.facts.choosable_levels[0]

    @property
    def aggregation_kind(self) -> Aggregation:
        return self.aggregation or self.facts.aggregation

    @property
    def kl_kind(self) -> KLEstimator:
        return self.kl_estimator or self.facts.kl_estimator

    @property
    def weighs_sampler(self) -> bool:
        return not self.is_custom and self.facts.weighs_sampler

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `LossInputs.entropy` must be there."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy or self.top_entropy_quantile < 1

    @property
    def reads_every_token(self) -> bool:
        """Whether a token without an advantage may change the loss: by KL, entropy, or what is held back."""
        in_loss = self.needs_reference and not self.kl_in_reward
        return self.is_custom or in_loss or self.needs_entropy or self.facts.holds_back

    @property
    def needs_sampler(self) -> bool:
        """Whether `LossInputs.sampler_logprobs` must be there."""
        return self.sampler_correction not in (None, "none")

    @property
    def reads_sampler(self) -> bool:
        """Whether `LossInputs.sampler_logprobs` change the loss where they are there."""
        return self.needs_sampler or self.off_policy_mask_threshold is not None or self.is_custom

    def _resolve(self) -> None:
        facts = self.facts
        unread = loss_specific().difference(facts.fields)
        refuse_unread(self, unread, f"is not read by loss_type = {self.loss_type!r}")
        if facts.epsilon is not None:
            low, high = facts.epsilon if self.epsilon_low is None else (self.epsilon_low, self.epsilon_low)
            object.__setattr__(self, "epsilon_low", low)
            object.__setattr__(self, "epsilon_high", high if self.epsilon_high is None else self.epsilon_high)
        if self.importance_sampling_level not in (None, *facts.choosable_levels):
            raise ValueError(
                f"importance_sampling_level = {self.importance_sampling_level!r} contradicts loss_type = "
                f"{self.loss_type!r}, whose ratio is fixed by its paper (allowed: "
                f"{', '.join(facts.choosable_levels)}); leave it out, or choose loss_type='gspo' for a "
                "sequence-level ratio"
            )
        if self.beta != 0 and facts.forbids_kl:
            raise ValueError(
                f"beta = {self.beta} with loss_type = {self.loss_type!r}: {facts.forbids_kl}, or set beta = 0"
            )
        level = (self.sampler_correction or "none").partition("_")[0]
        if self.weighs_sampler and level not in ("none", "token"):
            raise ValueError(
                f"sampler_correction = {self.sampler_correction!r} contradicts loss_type = "
                f"{self.loss_type!r}, which multiplies token ratios into a sequence weight of its own; use "
                "'token_truncate', 'token_mask' or 'none'"
            )

    def _check_custom(self) -> None:
        module, _, function = self.loss_type.partition(":")
        parts = (*module.split("."), function)
        if OBJECT_MARK not in function and not all(part.isidentifier() for part in parts):
            raise ValueError(
                f"loss_type = {self.loss_type!r} is not an import path; write it as 'package.module:function'"
            )
        others = {f.name for f in fields(self)} - {"loss_type", "beta", "max_completion_length"}
        refuse_unread(self, others, "is not read by a loss of your own, which gets LossInputs only")

    def _check_ranges(self) -> None:
        if self.kl_in_reward and self.use_bias_correction_kl:
            raise ValueError(
                "use_bias_correction_kl = True corrects the gradient of a KL in the loss, but kl_in_reward = "
                "True takes it from the reward; set one of them to false"
            )
        if self.needs_sampler and self.sampler_clip_min is None and self.sampler_clip_max is None:
            raise ValueError(
                f"sampler_correction = {self.sampler_correction!r} has no bound: sampler_clip_min and "
                "sampler_clip_max are both null; set at least one"
            )
        ceiling = 1 + (self.epsilon_high or 0.0)
        if not self.is_custom and self.facts.absolute_ceiling and (self.epsilon_high or 0.0) <= 1:
            raise ValueError(
                f"epsilon_high = {self.epsilon_high} would bound every weight of loss_type = "
                f"{self.loss_type!r}, whose ceiling is absolute here; what verl writes as "
                f"{self.epsilon_high} is {ceiling}"
            )
        if self.delta is not None and self.delta <= ceiling:
            raise ValueError(
                f"delta = {self.delta} must exceed 1 + epsilon_high = {ceiling}, or it undoes the clip; "
                "raise delta or leave it out"
            )
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef_min = {self.entropy_coef_min} exceeds entropy_coef_max = "
                f"{self.entropy_coef_max}; swap them"
            )
        for lower, upper in (("clip_cov_low", "clip_cov_high"), ("sampler_clip_min", "sampler_clip_max")):
            low, high = getattr(self, lower), getattr(self, upper)
            if low is not None and high is not None and low >= high:
                raise ValueError(f"{lower} = {low} must be below {upper} = {high}; lower it")


GRPOLossConfig.__doc__ = (
    f"{GRPOLossConfig.__doc__}\n    Advantages, which the caller makes, by loss:\n"
    + "".join(f"        {name}: {facts.advantages}\n" for name, facts in CATALOG.items())
)
