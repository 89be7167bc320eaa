"""What is maximised: an entry of the `rewards` section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

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


DEFAULT_TIMEOUT = 60.0


class RewardConfig(Section):
    """One reward function, and how it counts."""

    reward: str = Field(description="a built-in's name, or `module:function`, or `path/to/file.py:function`")
    weight: float = Field(
        1.0, ge=-1e6, le=1e6, description="its factor in the sum of rewards; negative: a punishment"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments bound to the function")
    timeout: float = Field(
        DEFAULT_TIMEOUT,
        gt=0,
        le=1e6,
        description="seconds one call may take; math_verify limits each answer instead, by its option "
        "`time_limit`",
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="what a raised error or a timeout does: end the run, or leave the reward out"
    )
    per_group: bool = Field(
        False,
        description="true: it scores each prompt's completions by themselves, so it is called for a group as "
        "soon as that is complete, while others still decode; built-in rewards always are",
    )

    @model_validator(mode="after")
    def _reads_timeout(self) -> RewardConfig:
        if self.call_timeout is None and self.timeout != DEFAULT_TIMEOUT:
            raise ValueError(
                f"timeout = {self.timeout:g} limits no call of {self.reward}, which limits each answer: set "
                "its options: {time_limit: SECONDS} instead"
            )
        return self

    @property
    def call_timeout(self) -> float | None:
        """Seconds of one call; None for a reward that limits each answer."""
        return None if self.reward == "math_verify" else self.timeout
