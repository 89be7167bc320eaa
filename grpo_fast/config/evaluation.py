"""When and how held-out questions are scored: the section `evaluation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.section import Count, PositiveInt, Section


class EvaluationConfig(Section):
    """When and how held-out questions are scored."""

    dataset: DatasetConfig | None = Field(
        None,
        description="held-out questions, read as those of dataset where nothing else is set: prompts, and "
        "with the same source its name and options; null: nothing is evaluated",
    )
    every: Count | None = Field(
        None,
        description="steps between evaluations; 0: before and after only; null: a tenth of the run, on as "
        "many questions as add at most 10 % to the completions; 0 where that is fewer than 30",
    )
    size: PositiveInt | None = Field(
        None, description="questions used while training; before and after use all"
    )
    num_samples: Annotated[int, Field(ge=1, le=2**16)] = Field(
        1, description="answers to each question; several need a temperature"
    )
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(0.0, description="of the answers; 0: greedy")
    threshold: float = Field(1.0, description="the reward from which an answer counts as right")
    reward: str | None = Field(None, description="which reward decides; null: the first")
