"""The section `evaluation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.section import Count, Group, PositiveInt, Section


class EvaluationConfig(Section):
    """When and how held-out questions are scored."""

    dataset: DatasetConfig | None = Field(
        None,
        description="held-out questions; inherits how `dataset` makes prompts, and with the same source its "
        "name and options; null: no evaluation",
    )
    every: Count | None = Field(
        None,
        description="steps between evaluations; 0: only before and after training; null: a tenth of the run, "
        "on as many questions as add at most 10 % to the completions, or 0 if these are fewer than 30",
    )
    size: PositiveInt | None = Field(
        None, description="questions during training; all are used before and after"
    )
    num_samples: Group = Field(1, description="completions for each question; more than 1 need a temperature")
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(0.0, description="of sampling; 0: greedy")
    threshold: float = Field(1.0, description="reward from which a completion is correct")
    reward: str | None = Field(None, description="name of the reward that is compared; null: the first")
