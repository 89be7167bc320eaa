"""LUSPO as Liger 0.8 averages it where a term is per token: over every position, padding included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective.loss import kl_estimate


@dataclass(frozen=True)
class PaddedTokens:
    """A padded batch, every position scored."""

    logprobs: Tensor  # (B, T) float32, differentiable
    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor | None  # (B, T); None: no KL
    mask: Tensor  # (B, T) bool
    advantages: Tensor  # (B,)
    ratio: Tensor | None  # (B, 1) or (B, T), multiplies the policy term


def luspo_over_padding(
    tokens: PaddedTokens,
    *,
    level: str,
    beta: float,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    use_bias_correction_kl: bool,
) -> Tensor:
    """(): the mean over B·T positions of (length × term), LUSPO, arXiv 2602.05261.

    A term that is one per sequence comes out as in the paper. One per token (token ratios, a KL, a (B, T)
    ratio) is averaged with what stands in the padding, and weighs length/T of what `objective` gives it.
    """
    mask = tokens.mask.to(tokens.logprobs.dtype)
    lengths = mask.sum(1, keepdim=True)
    log_ratio = tokens.logprobs - tokens.old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths.clamp(min=1)
    importance = log_ratio.exp()
    bounded = importance.clamp(1 - epsilon_low, 1 + epsilon_high)
    free = importance if delta is None else importance.clamp(max=delta)
    advantages = tokens.advantages[:, None].to(mask.dtype)
    terms = -torch.minimum(free * advantages, bounded * advantages)
    if tokens.ratio is not None:
        terms = terms * tokens.ratio
    if tokens.ref_logprobs is not None:
        kl = kl_estimate(tokens.logprobs, tokens.ref_logprobs, "k3")
        terms = terms + beta * (kl * importance if use_bias_correction_kl else kl)
    return (terms * lengths).mean()
