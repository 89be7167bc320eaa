"""What a run keeps: the `checkpoint` section of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_fast.section import PositiveInt, Section


class CheckpointConfig(Section):
    """How often a run is saved, and how many saves it keeps."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between checkpoints; 0: at the end only")
    keep: PositiveInt = 2
