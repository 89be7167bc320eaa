"""Clip-Cov and KL-Cov: entropy is kept up by holding back the few tokens whose covariance would spend it.

A token's covariance is its centred advantage times its centred log-probability. Centre, share and choice are
taken over the batch the function sees, so these two losses depend on how a step is cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.surrogates import PolicyTokens, Surrogate, clip


def clip_cov(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """GRPO's clip, and no gradient for a random few of the tokens with covariance within the bounds.

    Drawn from torch's default CPU generator.
    """
    surrogate = clip(tokens, config)
    covariance = token_covariance(tokens)
    candidates = (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)
    candidates &= tokens.segments.mask & ~surrogate.clipped["low"] & ~surrogate.clipped["high"]
    places = candidates.nonzero().squeeze(1)
    order = torch.randperm(places.numel()).to(places.device)
    dropped = torch.zeros_like(candidates)
    dropped[places[order[: _share(config.clip_cov_ratio, tokens)]]] = True
    loss = torch.where(dropped, 0, surrogate.loss)
    return Surrogate(loss, surrogate.ratio, surrogate.clipped | {"covariance": dropped})


def kl_cov(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−r·A without a clip, plus kl_cov_coef·|log r| on the tokens of highest covariance.

    The paper writes KL(π_old ‖ π_θ); |log r| is what its authors compute for it.
    """
    covariance = token_covariance(tokens).masked_fill(~tokens.segments.mask, -torch.inf)
    chosen = torch.zeros_like(tokens.segments.mask)
    chosen[covariance.topk(min(_share(config.kl_cov_ratio, tokens), covariance.numel())).indices] = True
    chosen &= tokens.segments.mask
    log_ratio = tokens.log_ratio
    ratio = log_ratio.exp()
    loss = torch.where(chosen, config.kl_cov_coef * log_ratio.abs(), 0) - ratio * tokens.advantages
    return Surrogate(loss, ratio.detach(), {"covariance": chosen})


def token_covariance(tokens: PolicyTokens) -> Tensor:
    """(N,) detached: (A − mean A)(log π − mean log π), means over the tokens that count."""
    mask, logprobs = tokens.segments.mask, tokens.logprobs.detach()
    count = mask.sum().clamp(min=1)
    # Entries that do not count are zero already, so plain sums are sums over those that do.
    return (tokens.advantages - tokens.advantages.sum() / count) * (logprobs - logprobs.sum() / count)


def _share(ratio: float, tokens: PolicyTokens) -> int:
    return max(int(ratio * int(tokens.segments.mask.sum())), 1)
