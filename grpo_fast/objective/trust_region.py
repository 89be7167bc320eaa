"""DPPO: a token leaves the update when the policy has moved too far there, not when its ratio is large.

How far is judged between two-outcome distributions, "this token" against "any other": no logits are needed.
`old_logprobs` should be the sampler's, as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.surrogates import PolicyTokens, Surrogate


def dppo_tv(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Trust region on the total variation |π_θ − π_old|."""
    moved = torch.expm1(tokens.logprobs.detach()) - torch.expm1(tokens.old_logprobs)
    return _masked(tokens, config, moved.abs(), moved)


def dppo_kl(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Trust region on KL(Bernoulli(π_old) ‖ Bernoulli(π_θ)), nats."""
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    rest, old_rest = -torch.expm1(logprobs), -torch.expm1(old)
    # xlogy keeps 0 · log 0 = 0 for tokens the old policy was sure of.
    divergence = old.exp() * (old - logprobs) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, rest)
    return _masked(tokens, config, divergence, logprobs - old)


def _masked(tokens: PolicyTokens, config: GRPOLossConfig, divergence: Tensor, direction: Tensor) -> Surrogate:
    """−sg[min(r, dppo_ratio_max)] · A · log π, without tokens that are too far and pushed further."""
    positive = tokens.advantages > 0
    high = positive & (direction > 0) & (divergence > config.epsilon_high)
    low = ~positive & (direction < 0) & (divergence > config.epsilon_low)
    ratio = tokens.log_ratio.detach().exp()
    weight = torch.where(high | low, 0, ratio.clamp(max=config.dppo_ratio_max))
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, ratio, {"low": low, "high": high})
