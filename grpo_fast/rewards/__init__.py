"""Reward functions: loading them, calling them, adding them up."""

from grpo_fast.rewards.reward_set import Reward, RewardSet, load_rewards
from grpo_fast.rewards.types import RewardError, RewardFunction, RewardResult

__all__ = ["Reward", "RewardError", "RewardFunction", "RewardResult", "RewardSet", "load_rewards"]
