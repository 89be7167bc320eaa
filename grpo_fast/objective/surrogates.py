"""The policy term of each loss, per token: what is minimised in place of the expected reward.

Every function maps `PolicyTokens` to a `Surrogate`. Papers and equations stand in `catalog.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_fast.objective.catalog import RatioLevel
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.segments import Segments


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens as a surrogate sees them; entries that do not count are zero."""

    logprobs: Tensor  # (N,) differentiable
    old_logprobs: Tensor  # (N,)
    advantages: Tensor  # (N,)
    segments: Segments
    sampler_weight: Tensor | None = None  # (N,) π_old/π_sampler, bounded; see `correction.py`

    @property
    def log_ratio(self) -> Tensor:
        """(N,) log π_θ/π_old of each token."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True)
class Surrogate:
    """Per-token terms, the ratio they rest on, and where it was cut."""

    loss: Tensor  # (N,) differentiable
    ratio: Tensor  # (N,) detached
    clipped: dict[str, Tensor] = field(default_factory=dict)  # name -> (N,) bool
    uses_sampler_weight: bool = False  # it is already inside `loss`


def log_importance(tokens: PolicyTokens, level: RatioLevel) -> Tensor:
    """(N,) log of the importance ratio; at the sequence levels all tokens of a sequence share it."""
    segments, log_ratio = tokens.segments, tokens.log_ratio
    if level == "token":
        return log_ratio
    if level == "sequence":
        return segments.spread(segments.mean(log_ratio))
    if level == "product":
        return segments.spread(segments.sum(log_ratio))
    # The value is the sequence's, the gradient the token's own.
    shared = segments.spread(segments.mean(log_ratio)).detach()
    return shared + tokens.logprobs - tokens.logprobs.detach()


def clip(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−min(r·A, clip(r)·A), with an absolute ceiling `delta` on r where A is negative."""
    log_ratio = log_importance(tokens, config.ratio_level)
    negative = tokens.advantages < 0
    low, high = _log_bounds(config)
    # min() only ever cuts on the side the advantage pushes to, so one clamp by sign says the same, and no
    # infinite ratio is ever multiplied by a gradient of zero.
    cap = math.inf if config.delta is None else math.log(config.delta)
    bounded = _clamp_by_sign(log_ratio, negative, low, cap, high)
    loss = -bounded.exp() * tokens.advantages
    clipped = {"low": (log_ratio < low) & negative, "high": (log_ratio > high) & (tokens.advantages > 0)}
    if config.delta is not None:
        clipped["delta"] = (log_ratio > math.log(config.delta)) & negative
    return Surrogate(loss, log_ratio.detach().exp(), clipped)


def geometric_mean(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−A · (∏ clip(r))^(1/|o|): log-ratios clipped to [−epsilon_low, epsilon_high], then averaged."""
    log_ratio, segments = tokens.log_ratio, tokens.segments
    negative = tokens.advantages < 0
    bounded = _clamp_by_sign(log_ratio, negative, -config.epsilon_low, math.inf, config.epsilon_high)
    mean = segments.spread(segments.mean(bounded))
    clipped = {
        "low": (log_ratio < -config.epsilon_low) & negative,
        "high": (log_ratio > config.epsilon_high) & (tokens.advantages > 0),
    }
    return Surrogate(-mean.exp() * tokens.advantages, log_ratio.detach().exp(), clipped)


def cispo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−sg[min(r, epsilon_high)] · A · log π: every token keeps a gradient, only its weight is bounded."""
    ratio = tokens.log_ratio.detach().exp()
    loss = -ratio.clamp(max=config.epsilon_high) * tokens.advantages * tokens.logprobs
    return Surrogate(loss, ratio, {"high": (ratio > config.epsilon_high) & (tokens.advantages > 0)})


def sapo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−σ(τ(r − 1)) · 4/τ · A, with a temperature τ for each sign of the advantage."""
    positive = tokens.advantages > 0
    temperature = _choose(positive, config.sapo_temperature_pos, config.sapo_temperature_neg, tokens.logprobs)
    # e⁴⁰ saturates the gate in every precision; beyond it the gradient would be 0 · ∞.
    ratio = tokens.log_ratio.clamp(max=40.0).exp()
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return Surrogate(-gate * tokens.advantages, ratio.detach())


def vespo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−φ(W) · A · log π, φ(W) = e^λ W^k e^(−λW) detached, W the ratio of the whole sequence."""
    positive = tokens.advantages >= 0
    k = _choose(positive, config.vespo_k_pos, config.vespo_k_neg, tokens.logprobs)
    rate = _choose(positive, config.vespo_lambda_pos, config.vespo_lambda_neg, tokens.logprobs)
    log_ratio = tokens.log_ratio.detach()
    # The bounds are the authors': they keep the exponentials in range and are part of the definition.
    log_weights = log_ratio.clamp(-20.0, 20.0)
    if tokens.sampler_weight is not None:
        log_weights = log_weights + tokens.sampler_weight.log().clamp(math.log(1e-8), 20.0)
    segments = tokens.segments
    log_weight = segments.spread(segments.sum(log_weights)).clamp(math.log(1e-8), 20.0)
    phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    loss = -phi * tokens.advantages * tokens.logprobs
    return Surrogate(loss, log_ratio.exp(), uses_sampler_weight=True)


def reinforce(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """−A · log π."""
    return Surrogate(-tokens.advantages * tokens.logprobs, tokens.log_ratio.detach().exp())


def _clamp_by_sign(values: Tensor, negative: Tensor, floor: float, cap: float, ceiling: float) -> Tensor:
    """To [floor, cap] where `negative`, to (−∞, ceiling] elsewhere."""
    return values.clamp(_choose(negative, floor, -math.inf, values), _choose(negative, cap, ceiling, values))


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # torch.where on two Python numbers would answer in float32, whatever the dtype of the loss.
    return torch.where(condition, torch.tensor(yes, dtype=like.dtype), torch.tensor(no, dtype=like.dtype))


def _log_bounds(config: GRPOLossConfig) -> tuple[float, float]:
    low = math.log1p(-config.epsilon_low) if config.epsilon_low < 1 else -math.inf
    return low, math.log1p(config.epsilon_high)
