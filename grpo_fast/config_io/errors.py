"""What is wrong with a configuration, told to the person who wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from grpo_fast.config_io import names
from grpo_fast.config_io.foreign_names import MOVED, RULES
from grpo_fast.config_io.foreign_rules import Absent

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration."""

    name: str  # dotted, or as the user wrote it
    message: str  # what is wrong, and what to do
    value: Any = ...  # `...`: nothing to show

    def __str__(self) -> str:
        shown = "" if self.value is ... else f" = {short(self.value)}"
        return f"{self.name}{shown}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


def short(value: Any, limit: int = 70) -> str:
    """A value in one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def unknown(name: str, value: Any) -> Problem:
    """A key that does not exist, with the reason if people know it from elsewhere, or the nearest names."""
    rule = RULES.get(name.rpartition(".")[2])
    if isinstance(rule, Absent):
        return Problem(name, f"has no place here: {rule.reason}", value)
    parent = name.rpartition(".")[0]
    bare = ".".join(part for part in parent.split(".") if not part.isdigit())
    found = names.nearest(name, extra=tuple(MOVED))
    found = [
        f"{parent}{key.removeprefix(bare)}" if parent and key.startswith(f"{bare}.") else key for key in found
    ]
    hint = (
        f"did you mean {' or '.join(found)}?"
        if found
        else "`grpo-fast train CONFIG --print-config` lists all"
    )
    return Problem(name, f"no such key; {hint}", value)


def from_validation(error: ValidationError, data: Any) -> list[Problem]:
    """Pydantic's errors over `data` in our words, the alternatives of one value together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_name(item, data), []).append(dict(item))
    return [_problem(name, items) for name, items in found.items()]


def _name(item: Any, data: Any) -> str:
    """The dotted name of an error: its location as far as the data goes, which leaves out union members."""
    parts = []
    for part in item["loc"]:
        if not isinstance(data, dict if isinstance(part, str) else list):
            break
        parts.append(str(part))
        data = data.get(part) if isinstance(data, dict) else data[part]
    return ".".join(parts)


def _problem(name: str, items: Sequence[dict[str, Any]]) -> Problem:
    first = items[0]
    if first["type"] == "missing":
        return Problem(name, f"is required{_described(name)}")
    if first["type"] in _UNKNOWN:
        return unknown(name, first["input"])
    message = " or ".join(dict.fromkeys(_message(item) for item in items))
    if not name:
        return Problem("the configuration", message)
    if first["type"] == "value_error" and isinstance(first["input"], dict):
        return Problem(name, message)
    return Problem(name, f"{message}{_described(name)}", first["input"])


def _message(item: dict[str, Any]) -> str:
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        options = [option.strip(" '") for option in item["ctx"]["expected"].replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(item["input"], options, 1)
        return f"should be {item['ctx']['expected']}" + (f"; did you mean {near[0]}?" if near else "")
    return item["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)


def _described(name: str) -> str:
    field = names.fields().get(".".join(part for part in name.split(".") if not part.isdigit()))
    return f" ({field.description})" if field and field.description else ""
