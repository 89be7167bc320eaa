"""The section `preference`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from grpo_fast.config.section import BandConfig, FromMapping, Positive, PositiveInt, Section
from grpo_fast.objective.comparisons import PreferenceLossConfig, RankingLossConfig


class BetaConfig(Section):
    """How `preference.loss.beta` changes during the run."""

    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="from loss.beta to final, over max_steps"
    )
    final: Positive | None = Field(None, description="beta at the last step")
    band: BandConfig | None = Field(
        None, description="beta follows `rewards/margins`, the previous step's reward gap; null: no"
    )
    min: Positive | None = Field(None, description="smallest beta; null: no bound")
    max: Positive | None = Field(None, description="largest beta; null: no bound")

    @model_validator(mode="after")
    def _complete(self) -> BetaConfig:
        if (self.schedule == "constant") != (self.final is None):
            raise ValueError(
                f"schedule = {self.schedule!r} contradicts final = {self.final}: linear and cosine need a "
                "final beta, constant has none"
            )
        if self.band and (self.min is None or self.max is None):
            raise ValueError("band needs bounds of beta; set min and max")
        if self.band and self.schedule != "constant":
            raise ValueError(f"band changes beta, and so does schedule = {self.schedule!r}; keep one")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} exceeds max = {self.max}; swap them")
        return self


class AnswersConfig(Section):
    """Completions made from the correct answer and plausible wrong ones."""

    template: str = Field("{answer}", description="turns an answer into a completion")
    column: str = Field("answer", description="column of the correct answer, a whole number")
    wrong: PositiveInt = Field(1, description="number of wrong answers for each prompt")

    @field_validator("template")
    @classmethod
    def _has_answer(cls, template: str) -> str:
        if "{answer}" not in template:
            raise ValueError(
                f"{template!r} has no {{answer}}, so correct and wrong completions would be equal"
            )
        return template


class PreferenceConfig(Section):
    """Training on fixed completions: `algorithm: dpo` reads `loss` and `beta`, `rank` reads `ranking`."""

    loss: Annotated[PreferenceLossConfig, FromMapping()] = Field(
        PreferenceLossConfig(), description="the loss of algorithm: dpo"
    )
    beta: BetaConfig = Field(BetaConfig(), description="how `loss.beta` changes during the run")
    ranking: Annotated[RankingLossConfig, FromMapping()] = Field(
        RankingLossConfig(), description="for algorithm: rank"
    )
    answers: AnswersConfig | None = Field(None, description="makes completions from answers")
    max_completion_length: PositiveInt | None = Field(
        None, description="tokens; a longer completion is an error; null: no limit"
    )

    @model_validator(mode="after")
    def _begins_within(self) -> PreferenceConfig:
        beta, low, high = self.loss.beta or 0.0, self.beta.min or 0.0, self.beta.max or math.inf
        if self.beta.band and not low <= beta <= high:
            raise ValueError(
                f"loss.beta = {beta} is not within beta.min = {low} and beta.max = {high}; move a bound"
            )
        return self
