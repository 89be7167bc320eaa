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
    from grpo_fast.rewards.early import EarlyScores
    from grpo_fast.rewards.reward_set import Reward, RewardSet, load_rewards
    from grpo_fast.rewards.types import RewardError, RewardFunction, RewardResult, weighted_sum
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "early": ["EarlyScores"],
            "reward_set": ["Reward", "RewardSet", "load_rewards"],
            "types": ["RewardError", "RewardFunction", "RewardResult", "weighted_sum"],
        },
    )
