"""Metrics of a policy loss, named as in TRL; `LossOutputs` says how those of micro-batches combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_fast.objective.config import GRPOLossConfig
from grpo_fast.objective.surrogates import PolicyTokens, Surrogate
from grpo_fast.objective.types import LossInputs, StepTotals, present, token_weights

RATIO_BAND = 0.1  # rounding keeps ratios within 1 ± this


def policy_metrics(
    surrogate: Surrogate,
    tokens: PolicyTokens,
    inputs: LossInputs,
    keep: Tensor,
    kl: Tensor | None,
    totals: StepTotals,
    config: GRPOLossConfig,
) -> dict[str, Tensor]:
    """Compute metrics of the ratio, clipping, masking, entropy, the sampler's mismatch and the KL.

    A clip ratio is a share of tokens, or of sequences where the ratio is the sequence's. `keep` (N,) bool is
    true where the policy term counts, `kl` is (N,), and masked entries of `inputs` are zero.
    """
    segments, mask = tokens.segments, inputs.loss_mask
    measured = StepTotals(
        totals.num_tokens if totals.measured_tokens is None else totals.measured_tokens,
        totals.num_sequences if totals.measured_sequences is None else totals.measured_sequences,
    )
    token_mean = token_weights("token_mean", segments, measured)
    whole_sequences = config.ratio_level in ("sequence", "product")
    mean = token_weights("sequence_mean", segments, measured) if whole_sequences else token_mean
    metrics = {
        "policy/ratio_mean": (mean * surrogate.ratio).sum(),
        "policy/ratio_min": masked_extreme(surrogate.ratio, mask, "min"),
        "policy/ratio_max": masked_extreme(surrogate.ratio, mask, "max"),
        "policy/masked_mean": (token_mean * ~keep).sum(),
    }
    clipped = {name: where.to(mean.dtype) for name, where in surrogate.clipped.items()}
    metrics |= {f"clip_ratio/{name}_mean": (mean * share).sum() for name, share in clipped.items()}
    if "low" in clipped:
        of_sequences = segments.spread(segments.mean(clipped["low"]))
        metrics["clip_ratio/low_min"] = masked_extreme(of_sequences, mask, "min")
        metrics["clip_ratio/region_mean"] = (mean * (clipped["low"] + clipped["high"])).sum()
    if "high" in clipped:
        of_sequences = segments.spread(segments.mean(clipped["high"]))
        metrics["clip_ratio/high_max"] = masked_extreme(of_sequences, mask, "max")
    if inputs.entropy is not None:
        metrics["entropy"] = (token_mean * inputs.entropy.detach()).sum()
    if inputs.sampler_logprobs is not None:
        log_ratio = tokens.old_logprobs - inputs.sampler_logprobs
        metrics |= mismatch_metrics(log_ratio, present(tokens.sampler_weight), mask, token_mean)
    if kl is not None:
        metrics["kl"] = (token_mean * kl.detach()).sum()
    return metrics


def mismatch_metrics(log_ratio: Tensor, weights: Tensor, mask: Tensor, mean: Tensor) -> dict[str, Tensor]:
    """Compare the sampler's log-probabilities with the trainer's.

    Args:
        log_ratio: (N,) log π_old/π_sampler.
        weights: (N,) the bounded ratio.
        mean: (N,) the weights of a mean over tokens.
    """
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
    """Return the largest ("max") or smallest ("min") unmasked value, (); ∓∞ where there is none."""
    worst = -torch.inf if which == "max" else torch.inf
    kept = torch.cat([values.detach().masked_fill(~mask, worst), values.new_full((1,), worst)])
    return kept.amax() if which == "max" else kept.amin()


def sum_metrics(shares: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Combine the shares of micro-batches or ranks: a sum, or the extreme of `_max` and `_min` metrics.

    They come from the device in one copy.
    """
    names = {name: None for share in shares for name in share}
    found = {name: [torch.as_tensor(s[name]).float() for s in shares if name in s] for name in names}
    values = [value for many in found.values() for value in many]
    if not values:
        return {}
    device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
    on_host = torch.stack([value.to(device) for value in values]).cpu()
    parts = on_host.split([len(many) for many in found.values()])
    combine = {"_max": torch.amax, "_min": torch.amin}
    return {
        name: combine.get(name[-4:], torch.sum)(part).item() for name, part in zip(found, parts, strict=True)
    }
