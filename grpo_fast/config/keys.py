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
# What the configuration no longer has: a key, for all below it too, or `key=value`, and what replaces it.
REMOVED: dict[str, str] = {"actor_rollout_ref": "verl's names are not read; `grpo-fast config` lists ours"}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


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


def takes_text(name: str) -> bool:
    """Whether the value of a key is a text and nothing else."""
    schema = keys().get(without_positions(name), {})
    return {kind.get("type") for kind in schema.get("anyOf", [schema])} <= {"string", "null"}


def without_positions(name: str) -> str:
    """`rewards.0.weight` as `rewards.weight`."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def unknown_key(name: str, value: Any = ...) -> Problem:
    """A key that does not exist: why, where it once did or people know it from elsewhere, or the nearest."""
    bare = without_positions(name)
    leaf = bare.rpartition(".")[2]
    if why := _removed(bare):
        return Problem(name, why, value)
    if leaf in ABSENT:
        return Problem(name, f"has no place here: {ABSENT[leaf].reason}", value)
    known = [*keys(), *MOVED]
    near = [
        *get_close_matches(bare, known, 2, 0.75),
        *(key for key in known if key.rpartition(".")[2] == leaf),
    ]
    parent, section = name.rpartition(".")[0], f"{bare.rpartition('.')[0]}."
    near = [f"{parent}.{key.removeprefix(section)}" if key.startswith(section) else key for key in near]
    likely = " or ".join([*dict.fromkeys(near)][:3])
    hint = f"did you mean {likely}?" if near else "`grpo-fast config` lists all"
    return Problem(name, f"no such key; {hint}", value)


def _removed(name: str) -> str | None:
    return next((why for key, why in REMOVED.items() if name == key or name.startswith(f"{key}.")), None)


def problems_of(error: ValidationError) -> list[Problem]:
    """Pydantic's errors in our words, the alternatives of one value together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        name = ".".join(map(str, item["loc"]))
        while name and item["type"] not in _UNKNOWN and without_positions(name) not in keys():
            name = name.rpartition(".")[0]  # a member of a union
        found.setdefault(name, []).append(item)
    return [_problem(name, items) for name, items in found.items()]


def _problem(name: str, items: Sequence[Mapping[str, Any]]) -> Problem:
    kind, value, bare = items[0]["type"], items[0]["input"], without_positions(name)
    description = keys().get(bare, {}).get("description")
    described = f" ({description})" if description else ""
    if value == FILL_IN:
        return Problem(name, TO_FILL_IN, FILL_IN)
    if kind in _UNKNOWN:
        return unknown_key(name, value)
    if kind == "missing":
        return Problem(name, f"is required{described}")
    texts = (item["msg"].removeprefix("Value error, ").replace("Input should", "should", 1) for item in items)
    message = _removed(f"{bare}={value}") or " or ".join(dict.fromkeys(texts))
    if not name or (kind == "value_error" and isinstance(value, dict)):
        return Problem(name or "the configuration", message)
    return Problem(name, f"{message}{described}", value)
