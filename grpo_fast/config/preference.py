"""The `preference` section of the configuration."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from grpo_fast.config.section import BandConfig, FromMapping, Positive, PositiveInt, Section
from grpo_fast.objective.comparisons import PreferenceLossConfig, RankingLossConfig


class BetaConfig(Section):
    """How `preference.loss.beta` moves during the run."""

    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="the way from loss.beta to final, over max_steps"
    )
    final: Positive | None = Field(None, description="beta of the last step")
    band: BandConfig | None = Field(
        None,
        description="beta follows `rewards/margins`, the reward gap of the step before; null: not at all",
    )
    min: Positive | None = Field(None, description="beta at least; null: no bound")
    max: Positive | None = Field(None, description="beta at most; null: no bound")

    @model_validator(mode="after")
    def _complete(self) -> BetaConfig:
        if (self.schedule == "constant") != (self.final is None):
            raise ValueError(
                f"schedule = {self.schedule!r} and final = {self.final} contradict each other: linear and "
                "cosine lead to a final beta, constant to none"
            )
        if self.band and (self.min is None or self.max is None):
            raise ValueError("band lets beta move freely; bound it with min and max")
        if self.band and self.schedule != "constant":
            raise ValueError(f"band moves beta, and so does schedule = {self.schedule!r}; keep one")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} exceeds max = {self.max}; swap them")
        return self


class AnswersConfig(Section):
    """Completions made from the right answer and plausible wrong ones."""

    template: str = Field("{answer}", description="makes a completion of an answer")
    column: str = Field("answer", description="the column with the right answer, a whole number")
    wrong: PositiveInt = Field(1, description="plausible wrong answers for each prompt")

    @field_validator("template")
    @classmethod
    def _has_answer(cls, template: str) -> str:
        if "{answer}" not in template:
            raise ValueError(f"{template!r} has no {{answer}}, so that right and wrong would read the same")
        return template


class PreferenceConfig(Section):
    """Training on fixed completions: `algorithm: dpo` reads `loss` and `beta`, `rank` reads `ranking`."""

    loss: Annotated[PreferenceLossConfig, FromMapping()] = Field(
        PreferenceLossConfig(), description="of algorithm: dpo"
    )
    beta: BetaConfig = Field(BetaConfig(), description="how `loss.beta` moves during the run")
    ranking: Annotated[RankingLossConfig, FromMapping()] = Field(
        RankingLossConfig(), description="of algorithm: rank"
    )
    answers: AnswersConfig | None = Field(
        None, description="makes the completions from the right answer, where the data hold none"
    )
    max_completion_length: PositiveInt | None = Field(
        None, description="tokens; a longer completion is an error"
    )

    @model_validator(mode="after")
    def _begins_within(self) -> PreferenceConfig:
        beta, low, high = self.loss.beta or 0.0, self.beta.min or 0.0, self.beta.max or math.inf
        if self.beta.band and not low <= beta <= high:
            raise ValueError(
                f"loss.beta = {beta} lies outside of beta.min = {low} and beta.max = {high}; move a bound"
            )
        return self
