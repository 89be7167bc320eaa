"""What is left of rewards by each baseline, and by what it is divided: the words of `advantage`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """What a baseline or a scale may read beside the advantages so far."""

    rewards: Tensor  # (G, n)
    centred: Tensor  # (G, n) about the group's mean; zero where there is none, and in flat groups
    valid: Tensor  # (G, n) bool: where a reward is a number
    count: Tensor  # (G, 1) of them in the group
    total: Callable[[Tensor], Tensor]  # (G, n) -> (G, 1): summed over the group
    lengths: Tensor | None  # (G, n) tokens
    eps: float


Estimator: TypeAlias = "Callable[[Tensor, GroupStatistics], Tensor]"
"""Advantages so far, (G, n), at first the centred rewards, to advantages (G, n)."""


def leave_one_out(advantages: Tensor, of: GroupStatistics) -> Tensor:
    """r_i minus the mean of the others is the centred reward times n / (n - 1)."""
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
            f"advantage.scale_rewards = 'mean' divides by a group's mean reward, and a reward is "
            f"{rewards.min().item():g}: give rewards of at least 0, or set scale_rewards to group"
        )
    return advantages / (of.total(rewards) / of.count.clamp(min=1) + of.eps)


BASELINES: dict[str, Estimator] = {"mean": lambda advantages, _: advantages, "leave_one_out": leave_one_out}
"""Of each completion: the group's mean, or the mean of the others. A row more is a word more."""

SCALES: dict[str, Estimator] = {
    "group": by_group,
    "batch": by_batch,
    "whiten": whitened,
    "mean": by_mean,
    "none": lambda advantages, _: advantages,
}
"""By the deviation of the group, the batch or all tokens about their mean, by the group's mean, or not."""


def deviation(values: Tensor) -> Tensor:
    """() unbiased standard deviation; zero of fewer than two values."""
    return values.std() if values.numel() > 1 else values.new_zeros(())
