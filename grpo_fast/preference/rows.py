"""Read rows of pairs, labelled completions and ranked groups, or make groups from a right answer.

| algorithm | a row |
|---|---|
| dpo | `prompt`, `chosen`, `rejected`, optional `margin` and `weight` |
| dpo with `loss_type: kto` | `prompt`, `completion`, `label` (true: desirable), optional `weight` |
| rank | `prompt`, `group`: a list of `RankedResponse`, optional `group_type` and `weight` |

Prompt, chosen, rejected and completion are text or conversations.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_fast.config.lookup import choices
from grpo_fast.config.preference import AnswersConfig
from grpo_fast.config.section import short
from grpo_fast.data.types import Prompt
from grpo_fast.rewards.builtins.options import answers_of

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Weight = Annotated[Number, Field(ge=0)]
M = TypeVar("M", bound=BaseModel)


class _RowModel(BaseModel):
    """A row; null counts as absent, since Arrow gives all rows all keys."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, row: Any) -> Any:
        return {k: v for k, v in row.items() if v is not None} if isinstance(row, Mapping) else row


class PairRow(_RowModel):
    """Optional columns of a pair or a labelled completion."""

    margin: Number = 0.0  # minimum gap between the rewards
    weight: Weight = 1.0  # factor of the loss


class RankedResponse(_RowModel):
    """A response with a rank or a score, the same of the two in the whole group; equal values are ties."""

    model_config = ConfigDict(extra="forbid")

    response: str
    rank: Annotated[Number, Field(ge=1)] | None = None  # 1 is best
    score: Number | None = None  # higher is better
    logprob: Annotated[Number, Field(le=0)] | None = None  # summed, under the policy that wrote it

    @field_validator("response")
    @classmethod
    def _not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("give text that is not empty")
        return text

    @model_validator(mode="after")
    def _one_grade(self) -> RankedResponse:
        if (self.rank is None) == (self.score is None):
            given = "neither" if self.rank is None else "both"
            raise ValueError(f"has {given} of rank and score; give one of them")
        return self

    @property
    def grade(self) -> float:
        """Higher is better."""
        return -self.rank if self.rank is not None else self.score or 0.0


class RankedGroup(_RowModel):
    """The responses to one prompt."""

    group: Annotated[list[RankedResponse], Field(min_length=2)]
    group_type: str | None = None  # evaluation reports each type
    weight: Weight = 1.0  # factor of the group's loss

    @model_validator(mode="after")
    def _consistent(self) -> RankedGroup:
        if len({item.rank is None for item in self.group}) > 1:
            raise ValueError("group mixes rank and score; give all responses the same one")
        first: dict[str, int] = {}
        for i, item in enumerate(self.group):
            earlier = first.setdefault(item.response, i)
            if self.group[earlier].grade != item.grade:
                raise ValueError(
                    f"group[{earlier}] and group[{i}] are the same response with different grades; keep one"
                )
        return self


def read_row(model: type[M], row: Mapping[str, Any]) -> M:
    """Validate a row of data; raise ValueError with the field, its value and what is expected."""
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])[1:]
        problem = first["msg"].removeprefix("Value error, ")
        named = f"{field} = {short(first['input'])}: " if field else ""
        raise ValueError(f"{named}{problem}") from None


def answers(prompt: Prompt, config: AnswersConfig, seed: int) -> list[dict[str, Any]]:
    """Return `response` and `score` of the right answer and of `config.wrong` plausible wrong ones."""
    if config.column not in prompt.columns:
        problem = f"is no column: {choices(config.column, prompt.columns)}"
        raise ValueError(f"preference.answers.column = {config.column!r} {problem}")
    value = prompt.columns[config.column]
    try:
        (right,) = {int(text) for text in answers_of(value) if "." not in text}
    except ValueError:
        raise ValueError(
            f"{config.column} = {short(value)} is no whole number, from which preference.answers makes wrong "
            "ones; give pairs or groups in the data instead"
        ) from None
    wrong = plausible_errors(right, config.wrong, random.Random(f"{seed}/{prompt.index}/{right}"))
    return [
        {"response": config.template.replace("{answer}", str(value)), "score": -float(abs(value - right))}
        for value in (right, *wrong)
    ]


def plausible_errors(right: int, n: int, rng: random.Random) -> list[int]:
    """Return `n` different errors: off by one or two, a lost carry, swapped digits, the wrong sign."""
    slips = {right + step for step in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)}
    digits = str(abs(right))
    if len(digits) > 1:
        slips.add((-1 if right < 0 else 1) * int(digits[:-2] + digits[-1] + digits[-2]))
    slips.add(-right)
    slips.discard(right)
    if n > len(slips):
        raise ValueError(
            f"preference.answers.wrong = {n} exceeds the {len(slips)} plausible errors for {right}"
        )
    return rng.sample(sorted(slips), n)
