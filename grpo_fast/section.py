"""What every part of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors; values don't change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def short(value: Any, limit: int = 70) -> str:
    """A value in one line of a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
