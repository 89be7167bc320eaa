"""The base class of the configuration's sections, and the types of their values.

Sections are strict: nothing is converted between numbers, text and switches, and numbers are finite.
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
Share = Annotated[float, Field(gt=0, le=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
Group = Annotated[int, Field(ge=1, le=2**16)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Seed = Count

EXACT = ConfigDict(extra="forbid", allow_inf_nan=False)


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys."""

    model_config = ConfigDict(**EXACT, strict=True, frozen=True, validate_default=True)


class BandConfig(Section):
    """A value that rises while a metric is below a band, and falls while it is above."""

    below: float = Field(description="multiply by 1 + step while the metric is below this")
    above: float = Field(description="multiply by 1 - step while the metric is above this")
    step: OpenShare = Field(0.1, description="relative change per step")

    @model_validator(mode="after")
    def _ordered(self) -> BandConfig:
        if self.below > self.above:
            raise ValueError(f"below = {self.below} exceeds above = {self.above}; swap them")
        return self

    def moved(self, value: float, measured: float, low: float, high: float) -> float:
        """Return the value after a step whose metric was `measured`, within [low, high]."""
        factor = 1 + self.step if measured < self.below else 1 - self.step if measured > self.above else 1.0
        return min(high, max(low, value * factor))


class FromMapping:
    """Annotate a strict dataclass that is a section: it accepts a mapping of its fields, too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        found: Any = handler.resolve_ref_schema(schema)
        found["strict"] = False
        return schema


def one_of(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Annotate `str`: the keys of a table, including keys that are added later."""

    def known(name: str) -> str:
        if name not in table:
            raise ValueError(f"is no {kind}; {choices(name, table)}")
        return name

    return AfterValidator(known)


def words(table: Mapping[str, Any]) -> WithJsonSchema:
    """Annotate next to `one_of`: the values that the reference lists."""
    return WithJsonSchema({"enum": [*table]})


def at(config: Any, name: str) -> Any:
    """Return the value of a dotted key; None within a section that is null."""
    return reduce(lambda section, key: getattr(section, key, None), name.split("."), config)


def plural(count: int, noun: str) -> str:
    """Return `1 prompt`, `1,200 prompts`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def short(value: Any, limit: int = 70) -> str:
    """Return a value for one line of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
