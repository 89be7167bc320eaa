"""What is maximised: an entry of the `rewards` section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_fast.config.section import Section

BUILTINS = {
    "exact_match": "grpo_fast.rewards.builtins.text:ExactMatch",
    "length": "grpo_fast.rewards.builtins.text:Length",
    "math_verify": "grpo_fast.rewards.builtins.math_equivalence:MathVerify",
    "numeric_match": "grpo_fast.rewards.builtins.text:NumericMatch",
    "reasoning_gym": "grpo_fast.rewards.builtins.reasoning_gym:ReasoningGym",
    "regex_format": "grpo_fast.rewards.builtins.text:RegexFormat",
    "soft_overlong": "grpo_fast.rewards.builtins.text:SoftOverlong",
    "tag_format": "grpo_fast.rewards.builtins.text:TagFormat",
    "tag_format_incremental": "grpo_fast.rewards.builtins.text:TagFormatIncremental",
}
"""Name: `module:Class` of a built-in reward, whose options are the fields of its class."""


class RewardConfig(Section):
    """One reward function, and how it counts."""

    reward: str = Field(description="a built-in's name, or `module:function`, or `path/to/file.py:function`")
    weight: float = Field(
        1.0, ge=-1e6, le=1e6, description="its factor in the sum of rewards; negative: a punishment"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments bound to the function")
    timeout: float = Field(60.0, gt=0, le=1e6, description="seconds one call may take")
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="what a raised error or a timeout does: end the run, or leave the reward out"
    )
    per_group: bool = Field(
        False,
        description="true: it scores each prompt's completions by themselves, so it is called for a group as "
        "soon as that is complete, while others still decode; pays for slow functions",
    )
