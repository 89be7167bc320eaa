"""Ranked groups, in a file or in the columns of a dataset.

A file holds one JSON object a line, `{"prompt", "group": [{"response", "rank"}, ...]}`.

| field | |
|---|---|
| `prompt` | text, or a list of messages |
| `group` | at least two responses |
| `group[i].response` | text |
| `group[i].rank` | 1 is best; equal ranks are ties |
| `group[i].score` | instead of ranks, for the whole group: higher is better; equal scores are ties |
| `group[i].logprob` | optional: log-probability of the response under the policy that wrote it, summed |
| `group_type` | optional: text; evaluation reports each type of its own |
| `weight` | optional: factor of the group's loss |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_fast.data.types import Message
from grpo_fast.run_record.files import read_jsonl

if TYPE_CHECKING:
    pass

Prompt = str | list[Message]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class RankedResponse:
    """A response and what it deserves."""

    response: str
    grade: float  # higher is better
    logprob: float | None = None  # under the policy that wrote it, summed


@dataclass(frozen=True)
class RankedGroup:
    """A prompt's responses, in the order of the file."""

    prompt: Prompt
    responses: tuple[RankedResponse, ...]
    group_type: str | None = None
    weight: float = 1.0


class Weighted(BaseModel):
    """What any row of data may hold. Keys that are null count as absent: Arrow gives all rows all keys."""

    weight: Annotated[Number, Field(ge=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, row: Any) -> Any:
        return {k: v for k, v in row.items() if v is not None} if isinstance(row, Mapping) else row


class _Item(Weighted):
    model_config = ConfigDict(extra="forbid")

    response: str
    rank: Annotated[Number, Field(ge=1)] | None = None  # 1 is best
    score: Number | None = None
    logprob: Annotated[Number, Field(le=0)] | None = None

    @field_validator("response")
    @classmethod
    def _not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("give text that is not empty")
        return text

    @model_validator(mode="after")
    def _one_grade(self) -> _Item:
        if (self.rank is None) == (self.score is None):
            given = "neither" if self.rank is None else "both"
            raise ValueError(f"has {given} of rank and score; give one of them")
        return self

    @property
    def grade(self) -> float:
        return -self.rank if self.rank is not None else self.score or 0.0


class _Row(Weighted):
    prompt: Any = None
    group: Annotated[list[_Item], Field(min_length=2)]
    group_type: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _Row:
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


def read_row(model: type[M], row: Mapping[str, Any], where: str) -> M:
    """A row of data as `model`.

    Raises:
        ValueError: names `where`, the field and its value, and says what is expected.
    """
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])[1:]
        value = repr(first["input"])
        value = value if len(value) <= 80 else f"{value[:77]}..."
        problem = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {f'{field} = {value}: ' if field else ''}{problem}") from None


def parse_group(row: Mapping[str, Any], where: str, prompt: Prompt | None = None) -> RankedGroup:
    """Read one row.

    Args:
        row: as above.
        where: the file and line, for error messages.
        prompt: the prompt, where it is not in the row.

    Raises:
        ValueError: names `where`, the field, its value and the remedy.
    """
    prompt = row.get("prompt") if prompt is None else prompt
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError(f"{where}: prompt = {prompt!r} must be text or a list of messages")
    found = read_row(_Row, row, where)
    responses = tuple(RankedResponse(item.response, item.grade, item.logprob) for item in found.group)
    return RankedGroup(prompt, responses, found.group_type, found.weight)


def read_ranked(path: str | Path) -> list[RankedGroup]:
    """The groups of a JSONL file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is no group; the message names the line and the field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return [
        parse_group(row, f"{path}, line {number}") for number, row in enumerate(read_jsonl(path), start=1)
    ]
