"""Baselines and scales of advantages: the words of the section `advantage`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the rewards that a baseline or a scale may read."""

    rewards: Tensor  # (G, n)
    centred: Tensor  # (G, n) rewards minus the group's mean; zero where there is none, and in flat groups
    valid: Tensor  # (G, n) bool: where a reward is a number
    count: Tensor  # (G, 1) of them in the group
    total: Callable[[Tensor], Tensor]  # (G, n) -> (G, 1): summed over the group
    lengths: Tensor | None  # (G, n) tokens
    eps: float


Estimator: TypeAlias = "Callable[[Tensor, GroupStatistics], Tensor]"
"""Maps advantages (G, n), at first the centered rewards, to advantages (G, n)."""


def leave_one_out(advantages: Tensor, of: GroupStatistics) -> Tensor:
    """Subtract the mean of the other rewards, which is the centered reward times n / (n - 1)."""
    return advantages * (of.count / (of.count - 1).clamp(min=1))


def by_group(advantages: Tensor, of: GroupStatistics) -> Tensor:
    return advantages / ((of.total(of.centred.square()) / (of.count - 1).clamp(min=1)).sqrt() + of.eps)


def by_batch(advantages: Tensor, of: GroupStatistics) -> Tensor:
    return advantages / (deviation(of.rewards[of.valid]) + of.eps)


def whitened(advantages: Tensor, of: GroupStatistics) -> Tensor:
    tokens = of.rewards.new_ones(of.rewards.shape) if of.lengths is None else of.lengths.to(of.rewards)
    tokens = tokens.where(of.valid, 0.0)
    shifted = advantages - (tokens * advantages).sum() / tokens.sum().clamp(min=1)
    variance = (tokens * shifted.square()).sum() / (tokens.sum() - 1).clamp(min=1)
    return shifted.where(of.valid, 0.0) * (variance + of.eps**2).rsqrt()


def by_mean(advantages: Tensor, of: GroupStatistics) -> Tensor:
    """Divide by the group's mean reward, as the gradient of log E[r] does. MaxRL, arXiv 2602.02710."""
    rewards = of.rewards.where(of.valid, 0.0)
    if (rewards < 0).any():
        raise ValueError(
            f"advantage.scale_rewards = 'mean' divides by a group's mean, and a reward is "
            f"{rewards.min().item():g}: give rewards of at least 0, or set scale_rewards to group"
        )
    return advantages / (of.total(rewards) / of.count.clamp(min=1) + of.eps)


BASELINES: dict[str, Estimator] = {"mean": lambda advantages, _: advantages, "leave_one_out": leave_one_out}
"""Baselines by name. Add a row to make a new value valid in the configuration."""

SCALES: dict[str, Estimator] = {
    "group": by_group,
    "batch": by_batch,
    "whiten": whitened,
    "mean": by_mean,
    "none": lambda advantages, _: advantages,
}
"""Divisors by name: deviation of the group, the batch or all tokens, the group's mean, or none."""


def deviation(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation (); zero for fewer than two values."""
    return values.std() if values.numel() > 1 else values.new_zeros(())
