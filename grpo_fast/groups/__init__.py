"""How prompts become groups, and rewards become advantages."""

from grpo_fast.groups.advantages import Advantages, group_advantages

__all__ = ["Advantages", "group_advantages"]
