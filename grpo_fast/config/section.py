"""The base class of every section of the configuration, and the types of its values.

Sections are strict: a number is a number, a text a text and a switch a switch. Numbers are finite; null
stands for no limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    model_validator,
)

from grpo_fast.config.lookup import choices
from grpo_fast.objective.config import LARGEST

_whole = BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)  # 1e3
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST), _whole]
Count = Annotated[int, Field(ge=0, le=LARGEST), _whole]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Count

EXACT = ConfigDict(extra="forbid", allow_inf_nan=False)


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values don't change once made."""

    model_config = ConfigDict(**EXACT, strict=True, frozen=True, validate_default=True)


class BandConfig(Section):
    """A value that rises by a share while a metric is below a band, and falls by it while above."""

    below: float = Field(description="the metric below it: the value rises, times 1 + step")
    above: float = Field(description="the metric above it: the value falls, times 1 - step")
    step: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="share of the value in one step")

    @model_validator(mode="after")
    def _ordered(self) -> BandConfig:
        if self.below > self.above:
            raise ValueError(f"below = {self.below} exceeds above = {self.above}; swap them")
        return self

    def moved(self, value: float, measured: float, low: float, high: float) -> float:
        """The value after a step whose metric was `measured`, within [low, high]."""
        factor = 1 + self.step if measured < self.below else 1 - self.step if measured > self.above else 1.0
        return min(high, max(low, value * factor))


class FromMapping:
    """Annotation of a strict dataclass that is a section: accept a mapping of its fields, too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        found: Any = handler.resolve_ref_schema(schema)
        found["strict"] = False
        return schema


def one_of(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Annotation of `str`: the rows of a table, including rows that are added later."""

    def known(name: str) -> str:
        if name not in table:
            raise ValueError(f"is no {kind}; {choices(name, table)}")
        return name

    return AfterValidator(known)


def words(table: Mapping[str, Any]) -> WithJsonSchema:
    """Annotation next to `one_of`: what the reference lists."""
    return WithJsonSchema({"enum": [*table]})


def at(config: Any, name: str) -> Any:
    """The value of a dotted key; None within a section that is not there."""
    return reduce(lambda section, key: getattr(section, key, None), name.split("."), config)


def plural(count: int, noun: str) -> str:
    """`1 prompt`, `1,200 prompts`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def short(value: Any, limit: int = 70) -> str:
    """A value in one line of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
