"""The configuration's keys, and errors about them."""

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
from grpo_fast.config.secrets import masked, redacted, without_pairs
from grpo_fast.config.section import short

TO_FILL_IN = "is to be filled in: the converted file does not have it"
# Removed keys, with all below them, and `key=value`: the replacement.
REMOVED: dict[str, str] = {
    "actor_rollout_ref": "verl's names are not read; `grpo-fast config` lists ours",
    "adaptive_weights.method=inverse_std": "was removed: advantage.multi_objective_aggregation = "
    "normalize_then_sum gives all rewards one spread",
    "distributed.head": "was removed: mode shard always gathers the head; leave it out",
    "model.attention=flex_attention": "was removed: auto takes flash-attention where it fits, else sdpa",
    "preference.beta.gap_gain": "was removed: preference.beta.band moves beta by the reward gap",
    "preference.beta.gap_smoothing": "was removed with preference.beta.gap_gain; leave it out",
    "preference.reference_cache": "was removed: each start computes the reference's log-probabilities anew",
    "rollout.num_generations=auto": "was removed: the default is 8, and `grpo-fast plan` prints the largest "
    "number that fits",
    "logging.show_samples": "was removed: the report, samples.jsonl and `grpo-fast preview` show completions",
}


@dataclass(frozen=True)
class Problem:
    """An error in a configuration."""

    name: str  # dotted, or as the user wrote it
    message: str  # what is wrong, and what to do
    value: Any = ...  # `...`: nothing to show

    def __str__(self) -> str:
        shown = "" if self.value is ... else f" = {short(without_pairs(masked(self.value, self.name)))}"
        return f"{self.name}{shown}: {redacted(self.message)}"


class ConfigError(ValueError):
    """A configuration that cannot be used, with all its `problems`."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


@cache
def keys() -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of each dotted key, sections before their keys, without list positions."""
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


def types_of(name: str) -> set[str]:
    """Return the JSON types of a key, or of a flat name; none where any value is allowed."""
    place = MOVED.get(name, name)
    schema = keys().get(without_positions(place), {}) if isinstance(place, str) else {}
    return {kind.get("type", "object") for kind in schema.get("anyOf", [schema]) if kind}


def takes_text(name: str) -> bool:
    """Whether the value of a key is text."""
    return bool(types := types_of(name)) and types <= {"string", "null"}


def without_positions(name: str) -> str:
    """Return `rewards.weight` for `rewards.0.weight`."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def removed(name: str) -> str | None:
    """Return the replacement of a removed key or `key=value`, or None."""
    return next((why for key, why in REMOVED.items() if name == key or name.startswith(f"{key}.")), None)


def unknown_key(name: str, value: Any = ...) -> Problem:
    """Return the problem of an unknown key: its replacement, why it has no place, or the nearest keys."""
    bare = without_positions(name)
    leaf = bare.rpartition(".")[2]
    if leaf in ABSENT or removed(bare):
        return Problem(name, removed(bare) or f"has no place here: {ABSENT[leaf].reason}", value)
    known = [*keys(), *MOVED]
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = get_close_matches(bare, known, 2, 0.75) + [key for key in known if f".{key}".endswith(f".{leaf}")]
    near = near or [leaves[one] for one in get_close_matches(leaf, leaves, 2, 0.75)]
    parent, section = name.rpartition(".")[0], f"{bare.rpartition('.')[0]}."
    near = [f"{parent}.{key.removeprefix(section)}" if key.startswith(section) else key for key in near]
    likely = " or ".join([*dict.fromkeys(near)][:3])
    hint = f"did you mean {likely}?" if near else "`grpo-fast config` lists all"
    return Problem(name, f"no such key; {hint}", value)


def problems_of(error: ValidationError) -> list[Problem]:
    """Return pydantic's errors as problems, one for the alternatives of a value."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        kind, value, name = item["type"], item["input"], ".".join(map(str, item["loc"]))
        if kind in ("extra_forbidden", "unexpected_keyword_argument"):
            found[name] = unknown_key(name, value)
            continue
        while name and without_positions(name) not in keys():
            name = name.rpartition(".")[0]  # within a union
        bare = without_positions(name)
        message = item["msg"].removeprefix("Value error, ").replace("Input should", "should", 1)
        message = message.removeprefix(f"{name} = {value!r}: ")
        message = removed(f"{bare}={value}") or {"missing": "is required"}.get(kind, message)
        if name in found:  # another alternative of the same value
            message = f"{message} or {found[name].message}"
        elif kind != "value_error" and (description := keys().get(bare, {}).get("description")):
            message = f"{message} ({description})"
        message = TO_FILL_IN if value == FILL_IN else message
        shown = ... if kind == "missing" or (kind == "value_error" and isinstance(value, dict)) else value
        found[name] = Problem(name or "the configuration", message, shown)
    return [*found.values()]
