"""Estimators of KL(π_θ ‖ π_ref) from the sampled token. Schulman 2020, "Approximating KL divergence"."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.catalog import KLEstimator


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """The KL of each token's distribution, estimated from the token drawn.

    Args:
        logprobs: (N,) log π_θ, differentiable.
        ref_logprobs: (N,) log π_ref.
        estimator: with d = log π_θ − log π_ref: k1 = d, unbiased, but its gradient has zero mean in a loss
            unless importance-corrected; k2 = d²/2, biased, its gradient is the KL's on-policy;
            k3 = e⁻ᵈ − 1 + d, unbiased and never negative.

    Returns:
        (N,), in nats.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # expm1 keeps the digits that e⁻ᵈ − 1 loses where the two policies nearly agree.
    return torch.expm1(-difference) + difference


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, beta: float, estimator: KLEstimator = "k1") -> Tensor:
    """What `kl_in_reward` takes from each token's reward: (N,), detached, never part of the graph.

    The reward of a whole completion loses the sum over its tokens.
    """
    return beta * kl_estimate(logprobs.detach(), ref_logprobs.detach(), estimator)
