"""Catalog of the policy losses and of the methods built on them, with their papers.

A policy loss is a sum over tokens of  weight × (surrogate + β · KL).  The surrogate is a function in
`surrogates.py`, the weight comes from the aggregation, the ratio from its level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from grpo_fast.objective.config import GRPOLossConfig

Settings = dict[str, Any]  # values by configuration key, such as "loss.beta"
Aggregation = Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"]
RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
KLEstimator = Literal["k1", "k2", "k3", "exact"]
Bounds = tuple[float, float, float]  # as `LossConstants` has them: low, high, cap


@dataclass(frozen=True)
class LossFacts:
    """One row of the catalog: a policy loss, and the settings of the method of the same name."""

    paper: str
    aggregation: Aggregation
    surrogate: str  # a function of `surrogates.py`, or a custom `module:function`
    cuts: tuple[str, ...] = ()  # where it clips the ratio: the metrics clip_ratio/*
    fused: Callable[[GRPOLossConfig], Bounds] | None = None  # bounds for the kernel's branch; None: no branch
    epsilon: tuple[float | None, float | None] | None = None  # default (low, high); None: no clipping
    absolute_ceiling: bool = False  # epsilon_high is the ceiling of the ratio itself
    moves_without_advantage: bool = False  # a token with advantage 0 has a gradient
    weighs_sampler: bool = False  # multiplies the sampler's token ratios into its own sequence weight
    fields: tuple[str, ...] = ()  # configuration fields that not every loss reads
    choosable_levels: tuple[RatioLevel, ...] = ("token",)  # of the importance ratio; the first by default
    kl_estimator: KLEstimator = "k3"
    forbids_kl: str = ""  # why a KL term is refused
    estimator: Settings = field(default_factory=dict)  # how the method computes advantages
    sets: Settings = field(default_factory=dict)  # the method's other settings


def clip_bounds(config: GRPOLossConfig) -> Bounds:
    """Return the bounds of the log-ratio."""
    low, high = config.epsilon_low or 0.0, config.epsilon_high or 0.0
    cap = math.inf if config.delta is None else math.log(config.delta)
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high), cap


def _plain_bounds(config: GRPOLossConfig) -> Bounds:
    """Return the bounds of the ratio itself, or of the divergence."""
    return config.epsilon_low or 0.0, config.epsilon_high or 0.0, config.dppo_ratio_max


_RANGE = ("epsilon_low", "epsilon_high")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_UNSCALED = {"advantage.scale_rewards": "none"}
_RESAMPLED = {"advantage.dynamic_sampling": True, "advantage.max_draws": 10}
_ANY: tuple[RatioLevel, ...] = ("token", "sequence", "sequence_token")
_clip = partial(
    LossFacts,
    surrogate="clip",
    cuts=("low", "high", "delta"),
    fused=clip_bounds,
    epsilon=(0.2, 0.2),
    fields=(*_RANGE, "delta"),
    choosable_levels=_ANY,
)
_gspo = partial(_clip, aggregation="sequence_mean", epsilon=(3e-4, 4e-4))
# Settings: verl's examples/dppo_trainer/run_qwen30b_dppo.sh, written by the paper's authors.
_dppo = partial(
    LossFacts,
    aggregation="token_mean",
    cuts=("low", "high"),
    fused=_plain_bounds,
    fields=(*_RANGE, "dppo_ratio_max"),
    estimator=_UNSCALED,
    sets={"loss.aggregation": "constant_length", "loss.dppo_ratio_max": 10000, "old_logprobs": "sampler"},
)

# A comment names the source of a row's settings where it is not the paper's equations.
CATALOG: dict[str, LossFacts] = {
    # Section 4.2: the KL coefficient; epsilon is not stated there, 0.2 is PPO's.
    "grpo": _clip("DeepSeekMath, arXiv 2402.03300, eq. 3", "sequence_mean", sets={"loss.beta": 0.04}),
    "bnpo": _clip("as in TRL: over a batch what dapo is over a step", "token_mean"),
    # And train_zero_math.py of sail-sg/understand-r1-zero.
    "dr_grpo": _clip("Dr. GRPO, arXiv 2503.20783, section 3.2", "constant_length", estimator=_UNSCALED),
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
        estimator={"advantage.baseline": "leave_one_out"} | _UNSCALED,
        sets={"loss.beta": 0.03, "loss.kl_estimator": "k1", "loss.kl_in_reward": True},
    ),
    # The rest by OpenRLHF's train_reinforce_baseline_hybrid_engine.sh.
    "reinforce_plus_plus_baseline": _clip(
        "REINFORCE++-baseline, arXiv 2501.03262, eq. 6 to 8",
        aggregation="token_mean",
        kl_estimator="k2",
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
        "SAPO, arXiv 2511.20347, eq. 5 and 6",
        "sequence_mean",
        "sapo",
        fused=lambda config: (config.sapo_temperature_neg, config.sapo_temperature_pos, 0.0),
        fields=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    # And recipe/vespo/run of FloyedShen/VESPO.
    "vespo": LossFacts("VESPO, arXiv 2602.10693", "token_mean", "vespo", weighs_sampler=True, fields=_VESPO),
    "gpg": LossFacts(
        "GPG, arXiv 2504.02546, eq. 5",
        aggregation="token_mean",
        surrogate="reinforce",
        fused=_plain_bounds,
        forbids_kl="GPG is defined without a reference model; use loss_type='reinforce' to add one",
        estimator=_UNSCALED | {"advantage.rescale_flat_groups": True},  # F_norm = 1, alpha = B / (B - M)
    ),
    # A baseline may not depend on the completion it is for.
    "reinforce": LossFacts(
        "REINFORCE, Williams 1992",
        "sequence_sum",
        "reinforce",
        fused=_plain_bounds,
        estimator={"advantage.baseline": "leave_one_out"} | _UNSCALED,
    ),
    "max_rl": LossFacts(
        "MaxRL, arXiv 2602.02710: REINFORCE towards log E[reward], advantages over the group's mean reward",
        aggregation="sequence_sum",
        surrogate="reinforce",
        fused=_plain_bounds,
        estimator={"advantage.scale_rewards": "mean"},
    ),
    # The paper's square is of a whole completion; verl 0.9 and Tinker take that of each token.
    "dro": LossFacts(
        "DRO, arXiv 2405.19107, of each token as verl and Tinker have it",
        aggregation="token_mean",
        surrogate="dro",
        fused=lambda config: (0.0, 0.0, config.dro_beta),  # in place of the cap
        moves_without_advantage=True,
        fields=("dro_beta",),
        estimator=_UNSCALED,
    ),
    # And recipe/dapo/7b_clip_cov.sh of PRIME-RL/Entropy-Mechanism-of-RL.
    "clip_cov": _clip(
        "Clip-Cov, arXiv 2505.22617, eq. 11 and 12",
        "token_mean",
        surrogate="clip_cov",
        cuts=("low", "high", "covariance"),
        fused=None,
        fields=(*_RANGE, "clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
        choosable_levels=("token",),
        sets={"loss.epsilon_low": 1.0, "loss.epsilon_high": 1.0} | _RESAMPLED,
    ),
    # And verl's recipe/entropy/7b_kl_cov.sh; 32b_kl_cov.sh has a share of 2e-4.
    "kl_cov": LossFacts(
        "KL-Cov, arXiv 2505.22617, eq. 13 and 14",
        "token_mean",
        "kl_cov",
        cuts=("covariance",),
        fields=("kl_cov_ratio", "kl_cov_coef"),
        sets={"loss.kl_cov_ratio": 2e-3} | _RESAMPLED,
    ),
    "dppo_tv": _dppo("DPPO-Binary-TV, arXiv 2602.04879", surrogate="dppo_tv", epsilon=(0.15, 0.15)),
    "dppo_kl": _dppo("DPPO-Binary-KL, arXiv 2602.04879", surrogate="dppo_kl", epsilon=(0.05, 0.05)),
}

DISTILLATION: dict[str, LossFacts] = {
    "opd": LossFacts(
        "on-policy distillation, GKD, arXiv 2306.13649: no surrogate, the divergence to the reference",
        aggregation="token_mean",
        surrogate="",
        fields=("jsd_beta",),
    ),
}
"""Losses that read no advantages: the exact divergence of two distributions at each token."""

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
    "opd": {"loss.loss_type": "opd", "loss.jsd_beta": 1.0},
    # Both papers find the policy's own current weights unstable as the teacher, and frozen ones stable.
    # Version 2, section 3: the results are of the forward KL.
    "sdft": {
        "loss.loss_type": "opd",
        "loss.jsd_beta": 0.0,
        "reference.prompt_template": "{prompt}\n\nThis is an example for a response to the question:\n"
        "{completion}\n\nNow answer with a response of your own, including the thinking process:\n",
    },
    # Section 2.3: the Jensen-Shannon divergence. Table 2: the prompt.
    "sdpo": {
        "loss.loss_type": "opd",
        "loss.jsd_beta": 0.5,
        "reference.prompt_template": "{prompt}\n\nCorrect solution:\n\n{solution}\n\n"
        "Correctly solve the original question.\n",
    },
    # The paper takes lambda and beta of every size; these are TRL's defaults.
    "gkd": {"loss.loss_type": "opd", "loss.jsd_beta": 0.5, "rollout.on_policy_share": 0.5},
}
"""Settings of each method: those of every loss, and of methods that use another method's loss."""

LOSS_TYPES = tuple(CATALOG)


def loss_specific(names: Iterable[str] | None = None) -> frozenset[str]:
    """Return the configuration fields that not every loss reads, of these losses or of all."""
    rows = CATALOG | DISTILLATION
    return frozenset[str]().union(*(rows[name].fields for name in names or rows))
