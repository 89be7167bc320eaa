"""Rewards become advantages: each completion against the others of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Rewards are float32 sums of a few terms: a spread below this is rounding, not a difference.
FLAT_SPREAD = 1e-6


@dataclass(frozen=True)
class Advantages:
    """G groups of n completions."""

    advantages: Tensor  # (G, n) float32, zero where the reward is not a number
    flat: Tensor  # (G,) bool: every reward of the group is the same, nothing to learn
    mean: Tensor  # (G,) float32, of the rewards
    std: Tensor  # (G,) float32, unbiased


def group_advantages(
    rewards: Tensor,
    *,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    eps: float = 1e-4,
) -> Advantages:
    """Advantage of each completion over its group.

    GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) subtracts the group's mean and divides by its
    standard deviation; Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) drops the division (`"none"`); the
    batch's deviation is Lite PPO's (Liu et al. 2025, arXiv:2508.08221). RLOO (Ahmadian et al. 2024,
    arXiv:2402.14740) takes the mean of the *other* completions as baseline.

    Args:
        rewards: (G, n) float, NaN where no reward applies to a completion.
        scale_rewards: divide by the group's deviation, the whole batch's, or not at all.
        baseline: the group's mean, or for each completion the mean of the others.
        eps: added to the deviation before dividing.

    Raises:
        ValueError: `rewards` is not (G, n) with n >= 2.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}; a group needs at least two completions: pass (groups, n >= 2)"
        )
    rewards = rewards.float()
    valid = rewards.isfinite()
    count = valid.sum(1, keepdim=True)
    filled = rewards.where(valid, 0.0)
    mean = filled.sum(1, keepdim=True) / count.clamp(min=1)
    spread = rewards.where(valid, -torch.inf).amax(1) - rewards.where(valid, torch.inf).amin(1)
    flat = ~(spread > FLAT_SPREAD)
    # A flat group's deviations from its rounded mean are noise that the division would blow up.
    centred = (rewards - mean).where(valid & ~flat[:, None], 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()

    advantages = centred
    if baseline == "leave_one_out":
        # r_i minus the mean of the others is the centred reward times n / (n - 1).
        advantages = advantages * (count / (count - 1).clamp(min=1))
    if scale_rewards == "group":
        advantages = advantages / (std + eps)
    elif scale_rewards == "batch":
        everything = rewards[valid]
        deviation = everything.std() if everything.numel() > 1 else everything.new_zeros(())
        advantages = advantages / (deviation + eps)
    return Advantages(
        advantages=advantages,
        flat=flat,
        mean=mean.squeeze(1),
        std=std.squeeze(1),
    )
