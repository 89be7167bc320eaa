"""An entry of the section `rewards`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_fast.config.section import Seconds, Section

_TEXT = "grpo_fast.rewards.builtins.text:"
BUILTINS = {
    "exact_match": f"{_TEXT}ExactMatch",
    "length": f"{_TEXT}Length",
    "math_verify": "grpo_fast.rewards.builtins.math_equivalence:MathVerify",
    "numeric_match": f"{_TEXT}NumericMatch",
    "reasoning_gym": "grpo_fast.rewards.builtins.reasoning_gym:ReasoningGym",
    "regex_format": f"{_TEXT}RegexFormat",
    "soft_overlong": f"{_TEXT}SoftOverlong",
    "tag_format": f"{_TEXT}TagFormat",
    "tag_format_incremental": f"{_TEXT}TagFormatIncremental",
}
"""Name: `module:Class` of a built-in reward, whose options are the fields of its class."""

DEFAULT_TIMEOUT = 60.0


class RewardConfig(Section):
    """A reward function and its weight."""

    reward: str = Field(description="a built-in reward, `module:function` or `path/to/file.py:function`")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="factor in the sum of rewards; negative: penalty")
    options: dict[str, Any] = Field({}, description="keyword arguments of the function")
    timeout: Seconds = Field(
        DEFAULT_TIMEOUT,
        description="seconds per call; math_verify limits each answer instead, by its option `time_limit`",
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="on an exception or a timeout: end the run, or skip the reward"
    )
    per_group: bool = Field(
        False,
        description="the function scores each group separately: it is called while other groups still "
        "decode; built-in rewards always are",
    )

    @model_validator(mode="after")
    def _reads_timeout(self) -> RewardConfig:
        if self.call_timeout is None and self.timeout != DEFAULT_TIMEOUT:
            raise ValueError(
                f"timeout = {self.timeout:g} is not read by {self.reward}, which limits each answer: set "
                "options: {time_limit: SECONDS}"
            )
        return self

    @property
    def call_timeout(self) -> float | None:
        """Seconds per call; None for a reward that limits each answer."""
        return None if self.reward == "math_verify" else self.timeout
