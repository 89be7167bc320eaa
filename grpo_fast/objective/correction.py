"""What to do when the sampler's log-probabilities are not the trainer's: weights and masks.

Truncated importance sampling (TIS): Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training". Masked (MIS) and geometric: Liu et al. 2025, "When speed kills stability". IcePop,
arXiv 2510.18855, is `token_mask` with a lower and an upper bound. Off-policy sequence mask: DeepSeek-V3.2,
arXiv 2512.02556, eq. 9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.catalog import GRPOLossConfig
from grpo_fast.objective.types import Segments


def sampler_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, segments: Segments, config: GRPOLossConfig
) -> Tensor:
    """The bounded ratio π_old/π_sampler that multiplies each token's policy term.

    `token_*` takes each token's own ratio, `sequence_*` the product over its sequence, `geometric_*` the
    geometric mean over its sequence. `*_truncate` clamps it to [sampler_clip_min, sampler_clip_max], `*_mask`
    makes it zero outside of them.

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

    Args:
        logprobs: (N,) log π_θ.
        behaviour_logprobs: (N,) log-probabilities under the policy that drew the tokens.
        threshold: the largest mean of log π_behaviour − log π_θ over a sequence, nats a token.

    Returns:
        (N,) bool.
    """
    drift = segments.spread(segments.mean(behaviour_logprobs - logprobs.detach()))
    return (advantages >= 0) | (drift <= threshold)
