"""How good a step's groups are to learn from, beyond their reward's spread."""

from __future__ import annotations

import math

from torch import Tensor


def length_reward_correlation(lengths: Tensor, rewards: Tensor) -> float | None:
    """Pearson's correlation of length and reward within groups, pooled over them.

    Differences between prompts don't enter: long answers to hard questions are no sign of anything.

    Args:
        lengths: (G, n) numbers of tokens.
        rewards: (G, n), NaN where a completion has none.

    Returns:
        A number from -1 to 1; None where lengths or rewards don't vary within any group.
    """
    scored = rewards.isfinite()
    length, reward = (_centred(values.double(), scored) for values in (lengths, rewards))
    variance = length.square().sum().item() * reward.square().sum().item()
    # Rewards are float32: products of less than their rounding are no spread.
    if variance < 1e-12:
        return None
    return (length * reward).sum().item() / math.sqrt(variance)


def _centred(values: Tensor, counted: Tensor) -> Tensor:
    """(G, n) minus the group's mean, zero where not counted."""
    filled = values.where(counted, 0.0)
    mean = filled.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return (values - mean).where(counted, 0.0)
