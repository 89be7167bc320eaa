"""`grpo-fast config`: every key of the configuration, and what TRL and Axolotl call it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_fast.config.foreign.names import MOVED
from grpo_fast.config.keys import ConfigError, keys, unknown_key, without_positions
from grpo_fast.config.section import LARGEST

KINDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "mapping"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
HEADING = """# The configuration

The keys of a run's YAML file; `evaluation.dataset` has those of `dataset`. `grpo-fast config --markdown`
writes this page.

| key | type | default | meaning | TRL, Axolotl |
|---|---|---|---|---|"""


def config(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the keys that are asked for, as lines or as the page of all."""
    name = without_positions((args.key or "").strip("-").replace("-", "_"))
    rows = [row(key) for key in keys() if not key.startswith("evaluation.dataset.")]
    found = [cells for cells in rows if not name or f"{cells[0]}.".startswith(f"{name}.")]
    found = found or [cells for cells in rows if name in (cells[0].rpartition(".")[2], *cells[4].split(", "))]
    if not found:
        raise ConfigError("config", [unknown_key(name)])
    line = "| `{}` | {} | `{}` | {} | {} |" if args.markdown else "{}: {} = {}\n    {}\n    TRL, Axolotl: {}"
    print(*([HEADING] if args.markdown else []), *(line.format(*cells) for cells in found), sep="\n")
    return 0


def row(name: str) -> list[str]:
    """Describe a key: its name, type, default and meaning, and what TRL and Axolotl call it."""
    schema, leaf = keys()[name], not any(key.startswith(f"{name}.") for key in keys())
    default = json.dumps(schema["default"]) if "default" in schema else "required"
    theirs = [
        theirs for theirs, rule in MOVED.items() if name == getattr(rule, "keywords", {}).get("to", rule)
    ]
    cells = [
        name,
        kind(schema),
        default if leaf else "...",
        schema.get("description", ""),
        ", ".join(theirs) or "-",
    ]
    return [cell.replace("|", "&#124;") for cell in cells]


def kind(schema: Mapping[str, Any]) -> str:
    """Name the type of a key, with its bounds."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(kind, schema["anyOf"])))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(json.dumps(value).strip('"') for value in values)
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items') or schema['prefixItems'][0])}"
    bounds = (
        f"{sign} {schema[key]:g}" for key, sign in BOUNDS.items() if schema.get(key, LARGEST) != LARGEST
    )
    return " ".join([KINDS.get(schema.get("type", ""), schema.get("type", "section")), *bounds])
