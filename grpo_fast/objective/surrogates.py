"""The policy term of each loss, per token: maps `PolicyTokens` to a `Surrogate`. Papers: `catalog.py`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_fast.config.lookup import load_callable
from grpo_fast.objective.catalog import RatioLevel, clip_bounds
from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.types import Segments, present


@dataclass(frozen=True)
class PolicyTokens:
    """Input of a surrogate; masked tokens are zero."""

    logprobs: Tensor  # (N,) differentiable
    old_logprobs: Tensor  # (N,)
    advantages: Tensor  # (N,)
    segments: Segments
    sampler_weight: Tensor | None = None  # (N,) π_old/π_sampler, bounded; see `terms.py`

    @property
    def log_ratio(self) -> Tensor:
        """(N,) log π_θ/π_old of each token."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True)
class Surrogate:
    """Per-token terms, the ratio they use, and where it was clipped."""

    loss: Tensor  # (N,) differentiable
    ratio: Tensor  # (N,) detached
    clipped: dict[str, Tensor] = field(default_factory=dict)  # name -> (N,) bool
    uses_sampler_weight: bool = False  # `loss` already contains the sampler weight


def log_importance(tokens: PolicyTokens, level: RatioLevel) -> Tensor:
    """Compute the (N,) log importance ratio; at sequence levels all tokens of a sequence share it."""
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
    """Compute PPO's clipped objective, with an absolute ceiling `delta` on r where A is negative."""
    log_ratio = log_importance(tokens, config.ratio_level)
    negative = tokens.advantages < 0
    low, high, cap = clip_bounds(config)
    # min() clips only on the side that the advantage pushes to, so one clamp by sign is equivalent, and no
    # infinite ratio is multiplied by a gradient of zero.
    bounded = _clamp_by_sign(log_ratio, negative, low, cap, high)
    loss = -bounded.exp() * tokens.advantages
    clipped = _clipped(log_ratio, tokens.advantages, low, high)
    if config.delta is not None:
        clipped["delta"] = (log_ratio > cap) & negative
    return Surrogate(loss, log_ratio.detach().exp(), clipped)


def geometric_mean(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −A · (∏ clip(r))^(1/|o|), with log-ratios clipped to [−epsilon_low, epsilon_high]."""
    log_ratio, segments = tokens.log_ratio, tokens.segments
    negative = tokens.advantages < 0
    low, high = -present(config.epsilon_low), present(config.epsilon_high)
    bounded = _clamp_by_sign(log_ratio, negative, low, math.inf, high)
    mean = segments.spread(segments.mean(bounded))
    clipped = _clipped(log_ratio, tokens.advantages, low, high)
    return Surrogate(-mean.exp() * tokens.advantages, log_ratio.detach().exp(), clipped)


def cispo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −sg[min(r, epsilon_high)] · A · log π: the weight is bounded, every token has a gradient."""
    ratio, ceiling = tokens.log_ratio.detach().exp(), present(config.epsilon_high)
    loss = -ratio.clamp(max=ceiling) * tokens.advantages * tokens.logprobs
    return Surrogate(loss, ratio, {"high": (ratio > ceiling) & (tokens.advantages > 0)})


def sapo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −σ(τ(r − 1)) · 4/τ · A, with a temperature τ for each sign of the advantage."""
    positive = tokens.advantages > 0
    temperature = _choose(positive, config.sapo_temperature_pos, config.sapo_temperature_neg, tokens.logprobs)
    # e⁴⁰ saturates the gate in every precision; beyond it the gradient would be 0 · ∞.
    ratio = tokens.log_ratio.clamp(max=40.0).exp()
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return Surrogate(-gate * tokens.advantages, ratio.detach())


def vespo(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −φ(W) · A · log π, φ(W) = e^λ W^k e^(−λW) detached, W the ratio of the whole sequence."""
    positive = tokens.advantages >= 0
    k = _choose(positive, config.vespo_k_pos, config.vespo_k_neg, tokens.logprobs)
    rate = _choose(positive, config.vespo_lambda_pos, config.vespo_lambda_neg, tokens.logprobs)
    log_ratio = tokens.log_ratio.detach()
    # These bounds are the authors' and part of the definition.
    log_weights = log_ratio.clamp(-20.0, 20.0)
    if tokens.sampler_weight is not None:
        log_weights = log_weights + tokens.sampler_weight.log().clamp(math.log(1e-8), 20.0)
    segments = tokens.segments
    log_weight = segments.spread(segments.sum(log_weights)).clamp(math.log(1e-8), 20.0)
    phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
    loss = -phi * tokens.advantages * tokens.logprobs
    return Surrogate(loss, log_ratio.exp(), uses_sampler_weight=True)


def reinforce(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −A · log π."""
    return Surrogate(-tokens.advantages * tokens.logprobs, tokens.log_ratio.detach().exp())


def dro(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −A · log π + dro_beta/2 · (log r)²."""
    log_ratio = tokens.log_ratio
    loss = 0.5 * config.dro_beta * log_ratio.square() - tokens.advantages * tokens.logprobs
    return Surrogate(loss, log_ratio.detach().exp())


# ------------------------------------------------------------------------------------ Clip-Cov and KL-Cov
# They keep the entropy up by changing the loss of the few tokens that would lower it most: those of high
# covariance between advantage and log-probability. The tokens are chosen within the micro-batch.


def clip_cov(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Clip as GRPO does, and drop the gradient of a share of the tokens whose covariance is within bounds.

    torch's default CPU generator samples these tokens from those whose ratio is not clipped.
    """
    surrogate, covariance = clip(tokens, config), _covariance(tokens)
    within = (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high) & tokens.segments.mask
    places = (within & ~surrogate.clipped["low"] & ~surrogate.clipped["high"]).nonzero().squeeze(1)
    order = torch.randperm(places.numel()).to(places.device)
    dropped = _first(places[order], config.clip_cov_ratio, tokens)
    loss = torch.where(dropped, 0, surrogate.loss)
    return Surrogate(loss, surrogate.ratio, surrogate.clipped | {"covariance": dropped})


def kl_cov(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute −r·A, plus kl_cov_coef·|log r| on the share of tokens with the highest covariance.

    The paper writes KL(π_old ‖ π_θ), and its authors' code computes |log r|.
    """
    covariance = _covariance(tokens).where(tokens.segments.mask, -torch.inf)
    penalized = _first(covariance.argsort(descending=True), config.kl_cov_ratio, tokens)
    log_ratio = tokens.log_ratio
    ratio = log_ratio.exp()
    loss = torch.where(penalized, config.kl_cov_coef * log_ratio.abs(), 0) - ratio * tokens.advantages
    return Surrogate(loss, ratio.detach(), {"covariance": penalized})


def _covariance(tokens: PolicyTokens) -> Tensor:
    """Compute (A − mean A)(log π − mean log π) of each token, (N,), with means over unmasked tokens."""
    mask = tokens.segments.mask
    count = mask.sum().clamp(min=1)

    def centered(values: Tensor) -> Tensor:
        return values - torch.where(mask, values, 0).sum() / count

    return centered(tokens.advantages) * centered(tokens.logprobs.detach())


def _first(places: Tensor, share: float, tokens: PolicyTokens) -> Tensor:
    """Return a mask (N,) of the first `places`: this share of the unmasked tokens, and at least one."""
    mask = tokens.segments.mask
    chosen = torch.zeros_like(mask)
    chosen[places[: max(int(share * int(mask.sum())), 1)]] = True
    return chosen


# --------------------------------------------------------------------------------------------------- DPPO
# A token leaves the update where the policy has moved too far. The distance is that of two-outcome
# distributions, "this token" against "any other", which needs no logits. `old_logprobs` should be the
# sampler's, as in the paper.


def dppo_tv(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute the loss with a trust region on the total variation |π_θ − π_old|."""
    moved = torch.expm1(tokens.logprobs.detach()) - torch.expm1(tokens.old_logprobs)
    return _trust_region(tokens, config, moved.abs(), moved)


def dppo_kl(tokens: PolicyTokens, config: GRPOLossConfig) -> Surrogate:
    """Compute the loss with a trust region on KL(Bernoulli(π_old) ‖ Bernoulli(π_θ)), nats."""
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    rest, old_rest = -torch.expm1(logprobs), -torch.expm1(old)
    # xlogy keeps 0 · log 0 = 0 for tokens the old policy was sure of.
    divergence = old.exp() * (old - logprobs) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, rest)
    return _trust_region(tokens, config, divergence, logprobs - old)


def _trust_region(
    tokens: PolicyTokens, config: GRPOLossConfig, divergence: Tensor, direction: Tensor
) -> Surrogate:
    """Compute −sg[min(r, dppo_ratio_max)] · A · log π, without tokens that are pushed further away."""
    positive = tokens.advantages > 0
    high = positive & (direction > 0) & (divergence > present(config.epsilon_high))
    low = ~positive & (direction < 0) & (divergence > present(config.epsilon_low))
    ratio = tokens.log_ratio.detach().exp()
    weight = torch.where(high | low, 0, ratio.clamp(max=config.dppo_ratio_max))
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, ratio, {"low": low, "high": high})


_THIS_MODULE = sys.modules[__name__]  # `globals()` would break the graph of torch.compile
SurrogateFunction = Callable[[PolicyTokens, GRPOLossConfig], Surrogate]


def surrogate_of(config: GRPOLossConfig) -> SurrogateFunction:
    """Return the function that the catalog's row names: of this module, or by import path."""
    name = config.facts.surrogate
    return load_callable(name, "surrogate") if ":" in name else getattr(_THIS_MODULE, name)


def _clamp_by_sign(values: Tensor, negative: Tensor, floor: float, cap: float, ceiling: float) -> Tensor:
    """Clamp to [floor, cap] where `negative`, to (−∞, ceiling] elsewhere."""
    return values.clamp(_choose(negative, floor, -math.inf, values), _choose(negative, cap, ceiling, values))


def _clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Return masks of the ratios beyond the bound that the advantage pushes them to."""
    return {"low": (log_ratio < low) & (advantages < 0), "high": (log_ratio > high) & (advantages > 0)}


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # torch.where of two Python numbers returns float32, whatever the dtype of the loss.
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))
