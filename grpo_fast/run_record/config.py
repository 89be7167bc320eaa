"""What a run writes down and keeps: the sections `checkpoint` and `logging`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_fast.section import PositiveInt, Section


class CheckpointConfig(Section):
    """How often a run is saved, and how many saves it keeps."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between checkpoints; 0: at the end only")
    keep: PositiveInt = 2


class LoggingConfig(Section):
    """What a run writes down, and for whom."""

    every: PositiveInt = 1
    samples_every: Annotated[int, Field(ge=0)] = 5
    samples: PositiveInt = 4
    tensorboard: bool = True
    wandb: bool = False
    trackio: bool = False
    project: str = "grpo_fast"
