"""Compute advantages: compare each completion with the others of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_fast.objective.estimators import BASELINES, SCALES, GroupStatistics, deviation

# Rewards are float32 sums of a few terms: a smaller spread is rounding.
FLAT_SPREAD = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Advantages of n completions for each of G prompts; a group is all completions that share a baseline."""

    advantages: Tensor  # (G, n) float, zero where the reward is NaN
    flat: Tensor  # (G,) bool: the group's rewards have zero variance


def group_advantages(
    rewards: Tensor,
    *,
    scale_rewards: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
    baseline_groups: Sequence[int] | Tensor | None = None,
    lengths: Tensor | None = None,
) -> Advantages:
    """Compute the advantage of each completion over its group.

    - GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) subtracts the group's mean and divides by its
      standard deviation. Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) does not divide (`"none"`). Lite PPO
      (Liu et al. 2025, arXiv:2508.08221) divides by the batch's deviation.
    - RLOO (Ahmadian et al. 2024, arXiv:2402.14740) subtracts the mean of the *other* completions.
    - REINFORCE++-baseline (Hu et al. 2025, arXiv:2501.03262) whitens over all tokens of the batch, as verl
      0.9 does: minus their mean, over the square root of their unbiased variance plus eps². A flat group's
      advantage is then not zero but minus that mean, scaled.

    Args:
        rewards: (G, n) float, NaN where no reward applies. float64 stays float64, all else becomes float32.
        scale_rewards: a key of `SCALES`.
        baseline: a key of `BASELINES`.
        eps: added to the deviation before dividing.
        baseline_groups: G integers; prompts of equal numbers form one group. None: one group per prompt.
        lengths: (G, n) tokens of each completion, its weight in "whiten"; None: equal weights.

    Raises:
        ValueError: `rewards` is not (G, n >= 2), or `baseline_groups` or `lengths` do not match it.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        shape = tuple(rewards.shape)
        raise ValueError(f"rewards has shape {shape}; pass (groups, n) with at least two completions each")
    if lengths is not None and lengths.shape != rewards.shape:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, and rewards {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    of_prompt, groups = _group_index(baseline_groups, rewards)
    valid = rewards.isfinite()
    filled = rewards.where(valid, 0.0)

    def total(values: Tensor) -> Tensor:  # (G, n) -> (G, 1), summed over the group
        sums = torch.zeros(groups, dtype=values.dtype, device=values.device)
        return sums.index_add(0, of_prompt, values.sum(1))[of_prompt, None]

    def extreme(values: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:  # (G, n) -> (G,)
        of_rows = getattr(values, reduce)(1)
        result = values.new_empty(groups).scatter_reduce(0, of_prompt, of_rows, reduce, include_self=False)
        return result[of_prompt]

    count = total(valid.long())
    mean = total(filled) / count.clamp(min=1)
    highest = extreme(rewards.where(valid, -torch.inf), "amax")
    flat = ~(highest - extreme(rewards.where(valid, torch.inf), "amin") > FLAT_SPREAD)
    # A flat group's deviations from its rounded mean are noise, which the division would amplify.
    centered = (rewards - mean).where(valid & ~flat[:, None], 0.0)

    of = GroupStatistics(rewards, centered, valid, count, total, lengths, eps)
    return Advantages(SCALES[scale_rewards](BASELINES[baseline](centered, of), of), flat)


def decoupled_advantages(
    table: Tensor,
    weights: Sequence[float],
    *,
    eps: float = 1e-4,
    baseline_groups: Sequence[int] | Tensor | None = None,
) -> Advantages:
    """Normalize each reward in its group, sum them by weight, and divide by the batch's deviation.

    GDPO (Liu et al. 2026, arXiv:2601.05242): summing first gives different combinations of rewards the same
    total, and lets a reward of large spread dominate. The batch's mean is zero, so it is not subtracted.

    Args:
        table: (G, n >= 2, F) float, NaN where a function does not apply to a completion.
        weights: F numbers; a group is flat if every reward of non-zero weight is.
        eps: as for `group_advantages`.
        baseline_groups: as for `group_advantages`.
    """
    if table.ndim != 3 or table.shape[-1] != len(weights):
        problem = f"table has shape {tuple(table.shape)} and there are {len(weights)} weights"
        raise ValueError(f"{problem}; pass (groups, n, rewards) with one weight per reward")
    parts = [
        group_advantages(column, eps=eps, baseline_groups=baseline_groups) for column in table.unbind(-1)
    ]
    summed = torch.zeros_like(parts[0].advantages)
    flat = torch.ones_like(parts[0].flat)
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            summed = summed + weight * part.advantages
            flat = flat & part.flat
    scored = table.isfinite().any(-1)
    return Advantages(summed / (deviation(summed[scored]) + eps), flat)


def spread_within(rewards: Tensor) -> float:
    """Return the mean over groups of the deviation of rewards (G, n), NaN where a completion has none.

    Groups with fewer than two rewards do not count; 0 if no group counts, NaN without any reward.
    """
    groups = [row[row.isfinite()] for row in rewards.double()]
    spreads = [deviation(row) for row in groups if len(row) > 1]
    if spreads:
        return torch.stack(spreads).mean().item()
    return 0.0 if any(map(len, groups)) else math.nan


def length_reward_correlation(lengths: Tensor, rewards: Tensor) -> float | None:
    """Compute Pearson's correlation of lengths and rewards (G, n) within groups, pooled over them.

    Differences between prompts do not count. None where lengths or rewards do not vary within any group.
    """
    pairs = torch.stack([lengths, rewards]).double().where(rewards.isfinite(), torch.nan)
    length, reward = (pairs - pairs.nanmean(-1, keepdim=True)).nan_to_num()
    variance = length.square().sum().item() * reward.square().sum().item()
    # Rewards are float32: a smaller product is rounding.
    if variance < 1e-12:
        return None
    return (length * reward).sum().item() / math.sqrt(variance)


def _group_index(baseline_groups: Sequence[int] | Tensor | None, rewards: Tensor) -> tuple[Tensor, int]:
    """Return the index of each prompt's group, (G,) int64, and the number of groups."""
    prompts = len(rewards)
    if baseline_groups is None:
        return torch.arange(prompts, device=rewards.device), prompts
    if len(baseline_groups) != prompts:
        raise ValueError(f"baseline_groups has {len(baseline_groups)} entries for {prompts} prompts")
    distinct, index = torch.as_tensor(baseline_groups, device=rewards.device).unique(return_inverse=True)
    return index, len(distinct)
