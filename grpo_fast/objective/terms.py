"""Terms and masks beside the surrogate: KL to a reference, sampler correction, entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective.catalog import KLEstimator
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.types import Segments

K3_LIMIT = 20.0  # nats, of log π_ref/π_θ; `kernels/policy_terms.py` has it, too


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref), (N,) nats, from the sampled tokens (Schulman 2020).

    With d = log π_θ − log π_ref: k1 = d, unbiased, but its gradient has zero mean in a loss unless
    importance-corrected; k2 = d²/2, biased, its gradient is the KL's on-policy; k3 = e⁻ᵈ − 1 + d, unbiased
    and never negative, with −d at most 20 as in verl, against overflow.
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
    """Compute the bounded ratio π_old/π_sampler, (N,) detached, that multiplies each token's policy term.

    `token_*` takes each token's own ratio, `sequence_*` the product over its sequence, `geometric_*` the
    geometric mean over its sequence. `*_truncate` clamps it to [sampler_clip_min, sampler_clip_max], `*_mask`
    makes it zero outside of them. Truncated (TIS): Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training". Masked (MIS) and geometric: Liu et al. 2025, "When speed kills
    stability". IcePop, arXiv 2510.18855, is `token_mask` with a lower and an upper bound. Without a
    correction all weights are 1.

    Args:
        trainer_logprobs: (N,) log π_old as the trainer computes it.
        sampler_logprobs: (N,) as the rollout engine reported them.
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
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, segments: Segments, threshold: float
) -> Tensor:
    """Mask tokens of negative advantage in sequences that drifted off-policy. Returns (N,) bool: kept.

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9.

    Args:
        logprobs: (N,) log π_θ.
        behavior_logprobs: (N,) log-probabilities under the policy that sampled the tokens.
        threshold: the largest mean of log π_behavior − log π_θ over a sequence, nats a token.
    """
    drift = segments.spread(segments.mean(behavior_logprobs - logprobs.detach()))
    return (advantages >= 0) | (drift <= threshold)


def entropy_threshold(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Return (), the least entropy of the top `quantile` of the unmasked tokens; infinite without any.

    Beyond the 80/20 Rule, arXiv 2506.01939, eq. 6, over the tokens of a micro-batch. A quantile of 0 keeps
    the highest token.
    """
    if not entropy.numel():
        return entropy.new_full((), torch.inf)
    counted = entropy.detach().masked_fill(~mask, torch.nan)
    return counted.nanquantile(1 - quantile).nan_to_num(nan=torch.inf)


@dataclass
class EntropyController:
    """Adapts `entropy_coef` between optimizer steps. Skywork-OR1, arXiv 2505.22312, section 3.2.5.

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
        """The coefficient for the next step, as `policy_loss` takes it."""
        return self.coef if self.last_entropy <= self.config.entropy_target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt to a finished step's mean entropy over the tokens that the bonus acted on, nats."""
        config = self.config
        if entropy <= config.entropy_target:
            self.coef = min(self.coef + config.entropy_coef_delta, config.entropy_coef_max)
        else:
            self.coef = max(self.coef - config.entropy_coef_delta, config.entropy_coef_min)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]
