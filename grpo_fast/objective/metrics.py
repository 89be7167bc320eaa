"""What a policy loss reports. Names are TRL's where TRL has them; see `LossOutputs` for how they combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_fast.objective.catalog import GRPOLossConfig
from grpo_fast.objective.surrogates import PreparedBatch, Surrogate

RATIO_BAND = 0.1  # a ratio beyond 1 ± this is more than rounding


def policy_metrics(surrogate: Surrogate, batch: PreparedBatch, config: GRPOLossConfig) -> dict[str, Tensor]:
    """Ratio, clipping, masking and entropy.

    A clip ratio is a share of tokens, or of sequences where the ratio is the sequence's.
    """
    mask = batch.segments.mask
    whole_sequences = config.ratio_level in ("sequence", "product")
    mean = batch.measured_sequence_mean if whole_sequences else batch.measured_token_mean
    metrics = {
        "policy/ratio_mean": (mean * surrogate.ratio).sum(),
        "policy/ratio_min": masked_extreme(surrogate.ratio, mask, "min"),
        "policy/ratio_max": masked_extreme(surrogate.ratio, mask, "max"),
        "policy/masked_mean": (batch.measured_token_mean * ~batch.keep).sum(),
    }
    clipped = {name: where.to(mean.dtype) for name, where in surrogate.clipped.items()}
    metrics |= {f"clip_ratio/{name}_mean": (mean * share).sum() for name, share in clipped.items()}
    if "low" in clipped:
        metrics["clip_ratio/low_min"] = _sequence_extreme(clipped["low"], batch, "min")
        metrics["clip_ratio/region_mean"] = (mean * (clipped["low"] + clipped["high"])).sum()
    if "high" in clipped:
        metrics["clip_ratio/high_max"] = _sequence_extreme(clipped["high"], batch, "max")
    if batch.entropy is not None:
        metrics["entropy"] = (batch.measured_token_mean * batch.entropy.detach()).sum()
    return metrics


def mismatch_metrics(batch: PreparedBatch) -> dict[str, Tensor]:
    """How far the sampler's log-probabilities are from the trainer's, and the weights that correct for it."""
    weights = batch.tokens.sampler_weight
    if batch.sampler_logprobs is None or weights is None:
        return {}
    mask, mean = batch.segments.mask, batch.measured_token_mean
    log_ratio = batch.tokens.old_logprobs - batch.sampler_logprobs
    difference, ratio = log_ratio.abs(), log_ratio.exp()
    outside = (ratio < 1 - RATIO_BAND) | (ratio > 1 + RATIO_BAND)
    return {
        "sampling/logp_difference_mean": (mean * difference).sum(),
        "sampling/logp_difference_max": masked_extreme(difference, mask, "max"),
        "sampling/kl": (mean * (torch.expm1(log_ratio) - log_ratio)).sum(),  # k3 of KL(sampler ‖ trainer)
        "sampling/kl_k1": -(mean * log_ratio).sum(),  # the same by its definition: unbiased too, but noisier
        "sampling/ratio_outside_mean": (mean * outside).sum(),
        "sampling/importance_ratio_mean": (mean * weights).sum(),
        "sampling/importance_ratio_min": masked_extreme(weights, mask, "min"),
        "sampling/importance_ratio_max": masked_extreme(weights, mask, "max"),
        "sampling/rejected_mean": (mean * (weights == 0)).sum(),
    }


def masked_extreme(values: Tensor, mask: Tensor, which: str) -> Tensor:
    """(): the largest ("max") or smallest ("min") value that counts; ∓∞ where none does."""
    worst = -torch.inf if which == "max" else torch.inf
    kept = torch.cat([values.detach().masked_fill(~mask, worst), values.new_full((1,), worst)])
    return kept.amax() if which == "max" else kept.amin()


def _sequence_extreme(share: Tensor, batch: PreparedBatch, which: str) -> Tensor:
    return masked_extreme(batch.segments.spread(batch.segments.mean(share)), batch.segments.mask, which)


def sum_metrics(shares: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """A step's metrics from the shares of its micro-batches, or of its ranks: they add up, but for extremes
    (`_max`, `_min`)."""
    combined = {}
    for name in {name: None for share in shares for name in share}:
        values = torch.stack([torch.as_tensor(s[name]).float().cpu() for s in shares if name in s])
        if name.endswith("_max"):
            combined[name] = values.max().item()
        elif name.endswith("_min"):
            combined[name] = values.min().item()
        else:
            combined[name] = values.sum().item()
    return combined
