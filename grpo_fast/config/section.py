"""The base class of every section of the configuration, and the rule for its values.

A number is a number, a text a text and a switch a switch: none is turned into another. Every number is
finite, wherever it stands; what has no limit is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from numbers import Real
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from grpo_fast.config.lookup import choices

LARGEST = 2**31 - 1  # of a whole number: what torch, NumPy and vLLM all take

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=LARGEST)]

# Of sections and of dataclasses that stand for one.
EXACT = ConfigDict(extra="forbid", allow_inf_nan=False)


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values don't change once made."""

    model_config = ConfigDict(**EXACT, frozen=True, validate_default=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_written(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        made = handler(value)
        if errors := list(_changes(value, made)):
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return made


def _changes(written: Any, made: Any, place: tuple[str | int, ...] = ()) -> Iterator[InitErrorDetails]:
    """Values that validation converted, and numbers of free-form mappings that are not finite."""
    if isinstance(made, BaseModel) or isinstance(written, BaseModel):
        return
    if isinstance(written, Mapping):
        values = vars(made) if is_dataclass(made) else made
        for key, value in written.items():
            yield from _changes(value, values[key], (*place, key))
    elif isinstance(written, list | tuple):
        for index, (value, one) in enumerate(zip(written, made, strict=True)):
            yield from _changes(value, one, (*place, index))
    elif _kind(written) != _kind(made):
        message = f"should be {_kind(made)}, not {_kind(written)}"
        yield InitErrorDetails(type=PydanticCustomError("kind", message), loc=place, input=written)
    elif isinstance(made, float) and not math.isfinite(made):
        yield InitErrorDetails(type="finite_number", loc=place, input=written)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Real):
        return "a number"
    return "text" if isinstance(value, str) else type(value).__name__


def one_of(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Beside `str`: the rows of a table, those that are added to it too."""

    def known(name: str) -> str:
        if name not in table:
            raise ValueError(f"is no {kind}; {choices(name, table)}")
        return name

    return AfterValidator(known)


def words(table: Mapping[str, Any]) -> WithJsonSchema:
    """Beside `one_of`: what the reference lists."""
    return WithJsonSchema({"enum": [*table]})


def short(value: Any, limit: int = 70) -> str:
    """A value in one line of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
