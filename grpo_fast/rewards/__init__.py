"""Load reward functions, call them, and add up their values."""

from grpo_fast.rewards.early import EarlyScores
from grpo_fast.rewards.reward_set import Reward, RewardSet, load_rewards
from grpo_fast.rewards.types import RewardError, RewardFunction, RewardResult, weighted_sum

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
