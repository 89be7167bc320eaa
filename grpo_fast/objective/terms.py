"""What joins, weighs or masks the surrogate: the KL to a reference, the sampler's correction, entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective.catalog import KLEstimator
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.types import Segments

K3_LIMIT = 20.0  # nats, of log π_ref/π_θ; `kernels/policy_terms.py` has it, too


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(π_θ ‖ π_ref) of each token's distribution, estimated from the token drawn.

    Schulman 2020, "Approximating KL divergence".

    Args:
        logprobs: (N,) log π_θ, differentiable.
        ref_logprobs: (N,) log π_ref.
        estimator: with d = log π_θ − log π_ref: k1 = d, unbiased, but its gradient has zero mean in a loss
            unless importance-corrected; k2 = d²/2, biased, its gradient is the KL's on-policy;
            k3 = e⁻ᵈ − 1 + d, unbiased and never negative. It takes −d as at most 20 (verl's bound): larger
            numbers would overflow, and have no gradient.

    Returns:
        (N,), in nats.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that e⁻ᵈ − 1 loses where the two policies nearly agree.
    bounded = (-difference).clamp(max=K3_LIMIT)
    return torch.expm1(bounded) - bounded


def sampler_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, segments: Segments, config: GRPOLossConfig
) -> Tensor:
    """The bounded ratio π_old/π_sampler that multiplies each token's policy term.

    `token_*` takes each token's own ratio, `sequence_*` the product over its sequence, `geometric_*` the
    geometric mean over its sequence. `*_truncate` clamps it to [sampler_clip_min, sampler_clip_max], `*_mask`
    makes it zero outside of them. Truncated (TIS): Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training". Masked (MIS) and geometric: Liu et al. 2025, "When speed kills
    stability". IcePop, arXiv 2510.18855, is `token_mask` with a lower and an upper bound.

    Args:
        trainer_logprobs: (N,) log π_old as the trainer computes it.
        sampler_logprobs: (N,) what the sampler reported.

    Returns:
        (N,), detached; one everywhere when the correction is None or "none".
    """
    level, _, action = (config.sampler_correction or "none").partition("_")
    if level == "none":
        return torch.ones_like(sampler_logprobs)
    log_ratio = (trainer_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = segments.spread(segments.sum(log_ratio))
    elif level == "geometric":
        log_ratio = segments.spread(segments.mean(log_ratio))
    ratio = log_ratio.exp()
    bounded = ratio.clamp(config.sampler_clip_min, config.sampler_clip_max)
    return bounded if action == "truncate" else torch.where(bounded == ratio, ratio, 0)


def off_policy_keep(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, segments: Segments, threshold: float
) -> Tensor:
    """Which tokens stay: those of negative advantage leave when their sequence drifted beyond the threshold.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9.

    Args:
        logprobs: (N,) log π_θ.
        behaviour_logprobs: (N,) log-probabilities under the policy that drew the tokens.
        threshold: the largest mean of log π_behaviour − log π_θ over a sequence, nats a token.

    Returns:
        (N,) bool.
    """
    drift = segments.spread(segments.mean(behaviour_logprobs - logprobs.detach()))
    return (advantages >= 0) | (drift <= threshold)


def entropy_threshold(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Return (), the entropy from which a token is among the top `quantile` of those that count.

    Beyond the 80/20 Rule, arXiv 2506.01939, eq. 6, over the tokens of a micro-batch.

    Args:
        entropy: (N,) nats.
        mask: (N,) bool; where it is nowhere true, the threshold is infinite.
        quantile: the share to keep, in [0, 1]; 0 keeps the highest token.
    """
    if not entropy.numel():
        return entropy.new_full((), torch.inf)
    counted = entropy.detach().masked_fill(~mask, torch.nan)
    return counted.nanquantile(1 - quantile).nan_to_num(nan=torch.inf)


@dataclass
class EntropyController:
    """Steers `entropy_coef` between optimiser steps. Skywork-OR1, arXiv 2505.22312, section 3.2.5.

    The coefficient rises by `entropy_coef_delta` after a step whose mean entropy was at or below
    `entropy_target`, falls by it after any other, and acts only while the last step's was at or below it.
    """

    config: GRPOLossConfig
    coef: float
    last_entropy: float = float("inf")

    @classmethod
    def of(cls, config: GRPOLossConfig) -> EntropyController:
        return cls(config, coef=config.entropy_coef)

    @property
    def active_coef(self) -> float:
        """The coefficient for the coming step, as `policy_loss` takes it."""
        return self.coef if self.last_entropy <= self.config.entropy_target else 0.0

    def update(self, entropy: float) -> None:
        """Take in a finished step's mean entropy over the tokens the bonus acted on, nats."""
        config = self.config
        if entropy <= config.entropy_target:
            self.coef = min(self.coef + config.entropy_coef_delta, config.entropy_coef_max)
        else:
            self.coef = max(self.coef - config.entropy_coef_delta, config.entropy_coef_min)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]
