"""The keys of the configuration, and what is wrong with one: every error in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError

from grpo_fast.config.foreign.conversion import FILL_IN
from grpo_fast.config.foreign.names import ABSENT, MOVED
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short

TO_FILL_IN = "is to be filled in: the file that it was converted from does not say"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration."""

    name: str  # dotted, or as the user wrote it
    message: str  # what is wrong, and what to do
    value: Any = ...  # `...`: nothing to show

    def __str__(self) -> str:
        shown = "" if self.value is ... else f" = {short(masked(self.value, self.name))}"
        return f"{self.name}{shown}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` holds all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


@cache
def keys() -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each key by dotted name, sections before what they hold, without list positions."""
    found: dict[str, Mapping[str, Any]] = {}
    schema = TrainConfig.model_json_schema()

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for inner in (*node.get("anyOf", ()), *filter(None, [node.get("items")])):
            walk(inner, prefix)
        for key, child in node.get("properties", {}).items():
            found[prefix + key] = child
            walk(child, f"{prefix}{key}.")

    walk(schema, "")
    return found


def free_form(name: str) -> bool:
    """Whether a key holds a mapping whose keys are the user's."""
    return "additionalProperties" in keys().get(name, ())


def is_key(name: str) -> bool:
    """Whether a dotted name is a key; free-form mappings take any."""
    name = without_positions(name)
    return name in keys() or any(name.startswith(f"{key}.") for key in filter(free_form, keys()))


def nearest_keys(name: str, limit: int = 3) -> list[str]:
    """Up to `limit` keys or flat names of other tools that a misspelt one may mean, the likeliest first.

    Keys of the same section come first, then the same last part elsewhere, then names alike.
    """
    parent, _, leaf = name.rpartition(".")
    known = {key: key.rpartition(".") for key in (*keys(), *MOVED)}
    beside = {last: key for key, (section, _, last) in known.items() if section == parent}
    found = [beside[last] for last in get_close_matches(leaf, beside, cutoff=0.7)]
    found += [key for key, (_, _, last) in known.items() if last == leaf]
    found += get_close_matches(name, known, cutoff=0.75)
    return list(dict.fromkeys(found))[:limit]


def without_positions(name: str) -> str:
    """`rewards.0.weight` as `rewards.weight`."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def unknown_key(name: str, value: Any = ...) -> Problem:
    """A key that does not exist, with the reason if people know it from elsewhere, or the nearest names."""
    parent, _, leaf = name.rpartition(".")
    if leaf in ABSENT:
        return Problem(name, f"has no place here: {ABSENT[leaf].reason}", value)
    bare = without_positions(parent)
    found = [
        f"{parent}{key.removeprefix(bare)}" if parent and key.startswith(f"{bare}.") else key
        for key in nearest_keys(without_positions(name))
    ]
    hint = f"did you mean {' or '.join(found)}?" if found else "`grpo-fast config` lists all"
    return Problem(name, f"no such key; {hint}", value)


def problems_of(error: ValidationError, data: Any) -> list[Problem]:
    """Pydantic's errors over `data` in our words, the alternatives of one value together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        found.setdefault(_name(item["loc"], data), []).append(item)
    return [_problem(name, items) for name, items in found.items()]


def _name(location: Sequence[str | int], data: Any) -> str:
    """The dotted name of an error: its location as far as the data goes, which leaves out union members."""
    parts = []
    for part in location:
        if isinstance(data, dict) and isinstance(part, str):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        parts.append(str(part))
    return ".".join(parts)


def _problem(name: str, items: Sequence[Mapping[str, Any]]) -> Problem:
    first, key = items[0], keys().get(without_positions(name), {})
    described = f" ({key['description']})" if "description" in key else ""
    if first["input"] == FILL_IN:
        return Problem(name, TO_FILL_IN, FILL_IN)
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return Problem(name, f"is required{described}")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(name, first["input"])
    message = " or ".join(dict.fromkeys(_message(item) for item in items))
    if {"type": "null"} in key.get("anyOf", ()) and first["type"] not in ("value_error", "ignored"):
        message += " or null"
    if not name or (first["type"] == "value_error" and isinstance(first["input"], dict)):
        return Problem(name or "the configuration", message)
    return Problem(name, f"{message}{described}", first["input"])


def _message(item: Mapping[str, Any]) -> str:
    kind = item["type"]
    if kind == "missing":
        return f"has no value number {item['loc'][-1] + 1}"
    if kind == "too_long":
        return f"has {item['ctx']['actual_length']} values, and takes {item['ctx']['max_length']}"
    if kind in ("model_type", "dataclass_type", "dict_type"):
        return "should hold keys, as {key: value}"
    if kind in ("list_type", "tuple_type"):
        return "should be a list, as [value, value]"
    if kind == "literal_error" and isinstance(item["input"], str):
        options = [option.strip(" '") for option in item["ctx"]["expected"].replace(" or ", ",").split(",")]
        near = get_close_matches(item["input"], options, 1)
        return f"should be {item['ctx']['expected']}" + (f"; did you mean {near[0]}?" if near else "")
    return item["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
