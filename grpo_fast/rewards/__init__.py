"""Reward functions: loading them, calling them, adding them up."""

from typing import TYPE_CHECKING

from grpo_fast.config.lookup import lazy_names

__all__ = [
    "EarlyScores",
    "Reward",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "RewardSet",
    "load_rewards",
    "weighted_sum",
]

if TYPE_CHECKING:
    from grpo_fast.rewards.reward_set import EarlyScores, Reward, RewardSet, load_rewards
    from grpo_fast.rewards.types import RewardError, RewardFunction, RewardResult, weighted_sum
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "reward_set": ["EarlyScores", "Reward", "RewardSet", "load_rewards"],
            "types": ["RewardError", "RewardFunction", "RewardResult", "weighted_sum"],
        },
    )
