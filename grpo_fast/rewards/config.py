"""What is maximised: an entry of the `rewards` section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_fast.section import Section


class RewardConfig(Section):
    """One reward function, and how it counts."""

    reward: str = Field(description="a built-in's name, or `module:function`, or `path/to/file.py:function`")
    weight: float = 1.0
    options: dict[str, Any] = Field({}, description="keyword arguments bound to the function")
    timeout: float = Field(60.0, gt=0, description="seconds one call may take")
    on_error: Literal["fail", "skip"] = "fail"
    per_group: bool = Field(
        False,
        description="true: it scores each prompt's completions by themselves, so it is called for a group as "
        "soon as that is complete, while others still decode; pays for slow functions",
    )
