"""Rewards become advantages: each completion against the others of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_fast.objective.estimators import BASELINES, SCALES, GroupStatistics, deviation

# Rewards are float32 sums of a few terms: a spread below this is rounding, not a difference.
FLAT_SPREAD = 1e-6


@dataclass(frozen=True)
class Advantages:
    """G prompts with n completions each. A group: a prompt's completions, or all that share its baseline."""

    advantages: Tensor  # (G, n) float, zero where the reward is not a number
    flat: Tensor  # (G,) bool: every reward of the group is the same, nothing to learn


def group_advantages(
    rewards: Tensor,
    *,
    scale_rewards: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
    baseline_groups: Sequence[int] | Tensor | None = None,
    lengths: Tensor | None = None,
) -> Advantages:
    """Advantage of each completion over its group.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) subtracts the group's mean and divides by its
    standard deviation; Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) drops the division (`"none"`); the
    batch's deviation is Lite PPO's (Liu et al. 2025, arXiv:2508.08221). RLOO (Ahmadian et al. 2024,
    arXiv:2402.14740) takes the mean of the *other* completions as baseline. REINFORCE++-baseline (Hu et al.
    2025, arXiv:2501.03262) whitens what is left over all tokens of the batch, as verl 0.9 does: minus their
    mean, over the square root of their unbiased variance plus eps². (The authors' OpenRLHF divides by the
    tokens, not by one less.) A flat group's advantage is then not zero but minus that mean, scaled.

    Args:
        rewards: (G, n) float, NaN where no reward applies to a completion. float64 stays float64, all else
            becomes float32.
        scale_rewards: a word of `SCALES`.
        baseline: a word of `BASELINES`.
        eps: added to the deviation before dividing.
        baseline_groups: G integers; prompts with the same one are one group of all their completions. None:
            each prompt is its own.
        lengths: (G, n) tokens of each completion, its weight in "whiten"; None: every completion counts one.

    Raises:
        ValueError: `rewards` is not (G, n) with n >= 2, `baseline_groups` has not G entries, or `lengths` is
            not (G, n).
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}; a group needs at least two completions: pass "
            "(groups, n >= 2)"
        )
    if lengths is not None and lengths.shape != rewards.shape:
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} for rewards of {tuple(rewards.shape)}; give one each"
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    of_prompt, groups = _group_index(baseline_groups, rewards)
    valid = rewards.isfinite()
    filled = rewards.where(valid, 0.0)

    def total(values: Tensor) -> Tensor:  # (G, n) -> (G, 1), summed over the group
        sums = torch.zeros(groups, dtype=values.dtype, device=values.device)
        return sums.index_add(0, of_prompt, values.sum(1))[of_prompt, None]

    def extreme(values: Tensor, reduce: Literal["amax", "amin"]) -> Tensor:  # (G, n) -> (G,)
        result = values.new_empty(groups)
        return result.scatter_reduce(0, of_prompt, getattr(values, reduce)(1), reduce, include_self=False)[
            of_prompt
        ]

    count = total(valid.long())
    mean = total(filled) / count.clamp(min=1)
    highest = extreme(rewards.where(valid, -torch.inf), "amax")
    flat = ~(highest - extreme(rewards.where(valid, torch.inf), "amin") > FLAT_SPREAD)
    # A flat group's deviations from its rounded mean are noise that the division would blow up.
    centred = (rewards - mean).where(valid & ~flat[:, None], 0.0)

    of = GroupStatistics(rewards, centred, valid, count, total, lengths, eps)
    return Advantages(SCALES[scale_rewards](BASELINES[baseline](centred, of), of), flat)


def decoupled_advantages(
    table: Tensor,
    weights: Sequence[float],
    *,
    eps: float = 1e-4,
    baseline_groups: Sequence[int] | Tensor | None = None,
) -> Advantages:
    """Each reward normalised in its group, then summed with its weight, then scaled by the batch's deviation.

    GDPO (Liu et al. 2026, arXiv:2601.05242): summing first lets different combinations of rewards
    fall on the same total, and lets a reward of large spread drown the others. The batch's mean is not
    subtracted, for it is zero: each reward's advantages add up to zero in every group.

    Args:
        table: (G, n, F) float, NaN where a function does not apply to a completion.
        weights: F numbers.
        eps, baseline_groups: as for `group_advantages`.

    Returns:
        A group is `flat` when every reward of non-zero weight is.

    Raises:
        ValueError: `table` is not (G, n >= 2, F), or there are not F weights.
    """
    if table.ndim != 3 or table.shape[-1] != len(weights):
        raise ValueError(
            f"table has shape {tuple(table.shape)} and there are {len(weights)} weights; pass (groups, n, "
            "rewards) with one weight a reward"
        )
    parts = [
        group_advantages(column, eps=eps, baseline_groups=baseline_groups) for column in table.unbind(-1)
    ]
    counting = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    summed = sum(
        (weight * part.advantages for part, weight in counting), torch.zeros_like(parts[0].advantages)
    )
    flat = torch.stack([part.flat for part, _ in counting] or [torch.ones_like(parts[0].flat)]).all(0)
    scored = table.isfinite().any(-1)
    return Advantages(summed / (deviation(summed[scored]) + eps), flat)


def spread_within(rewards: Tensor) -> float:
    """Return the mean over groups of the deviation of the rewards that each group has.

    Args:
        rewards: (G, n), NaN where a completion has none.

    Returns:
        A group with fewer than two rewards has no deviation and does not count. 0 where no group has two, NaN
        where there is no reward at all.
    """
    groups = [row[row.isfinite()] for row in rewards.double()]
    spreads = [deviation(row) for row in groups if len(row) > 1]
    if spreads:
        return torch.stack(spreads).mean().item()
    return 0.0 if any(map(len, groups)) else math.nan


def length_reward_correlation(lengths: Tensor, rewards: Tensor) -> float | None:
    """Pearson's correlation of length and reward within groups, pooled over them: whether longer pays.

    Differences between prompts don't enter: long answers to hard questions are no sign of anything.

    Args:
        lengths: (G, n) numbers of tokens.
        rewards: (G, n), NaN where a completion has none.

    Returns:
        A number from -1 to 1; None where lengths or rewards don't vary within any group.
    """
    pairs = torch.stack([lengths, rewards]).double().where(rewards.isfinite(), torch.nan)
    length, reward = (pairs - pairs.nanmean(-1, keepdim=True)).nan_to_num()
    variance = length.square().sum().item() * reward.square().sum().item()
    # Rewards are float32: products of less than their rounding are no spread.
    if variance < 1e-12:
        return None
    return (length * reward).sum().item() / math.sqrt(variance)


def _group_index(baseline_groups: Sequence[int] | Tensor | None, rewards: Tensor) -> tuple[Tensor, int]:
    """(index of each prompt's group (G,) int64, number of groups)."""
    prompts = len(rewards)
    if baseline_groups is None:
        return torch.arange(prompts, device=rewards.device), prompts
    if len(baseline_groups) != prompts:
        raise ValueError(
            f"baseline_groups has {len(baseline_groups)} entries for {prompts} prompts; give one each"
        )
    distinct, index = torch.as_tensor(baseline_groups, device=rewards.device).unique(return_inverse=True)
    return index, len(distinct)
