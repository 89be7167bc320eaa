"""`grpo-fast config` and `grpo-fast metrics`: describe keys of the configuration, and metrics."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_fast.config.foreign.names import ABSENT, MOVED, WORDS
from grpo_fast.config.keys import ConfigError, Problem, keys, removed, unknown_key, without_positions
from grpo_fast.config.load import RECIPES
from grpo_fast.config.section import LARGEST

KINDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "mapping"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
HEADING = """# The configuration

The keys of a run's YAML file. `evaluation.dataset` has the keys of `dataset`. `grpo-fast config --markdown`
prints this page.

| key | type | default | meaning | TRL, Axolotl |
|---|---|---|---|---|"""


def config(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the keys that match a word, or all keys."""
    name = without_positions((args.key or "").strip("- ").replace("-", "_").replace(" ", "_"))
    rows = [row(key) for key in keys() if not key.startswith("evaluation.dataset.")]
    found = [cells for cells in rows if not name or f"{cells[0]}.".startswith(f"{name}.")]
    found = found or [cells for cells in rows if name in (cells[0].rpartition(".")[2], *cells[4].split(", "))]
    meant = WORDS.get(name.lower(), ())
    found = [cells for cells in rows if cells[0] in meant and cells not in found] + found
    absent = name in ABSENT or removed(name) is not None
    also = [] if absent or not name or "." in name else search(name, rows)
    if not found and not also:
        raise ConfigError("config", [unknown_key(name)])
    found, also = (found, also) if found else (also, [])
    line = "| `{}` | {} | `{}` | {} | {} |" if args.markdown else "{}: {} = {}\n    {}\n    TRL, Axolotl: {}"
    print(*([HEADING] if args.markdown else []), *(line.format(*cells) for cells in found), sep="\n")
    others = [cells[0] for cells in also if cells not in found]
    if others and not args.markdown:
        print(f"    see also: {', '.join(others)}")
    for recipe in sorted(RECIPES.glob("*.yaml")):
        if name == recipe.stem:
            print(f"the recipe {name}: `grpo-fast train {name}`, or --print-config to see it")
    return 0


def search(word: str, rows: Sequence[list[str]]) -> list[list[str]]:
    """Return the rows with a word in the key, another tool's name or the description, in this order."""
    spaced = re.escape(word).replace("_", "[_ -]")
    pattern = re.compile(rf"(?<![a-z0-9]){spaced}s?(?![a-z0-9])", re.IGNORECASE)
    found: list[list[str]] = []
    for column in (0, 4, 3):
        found += [cells for cells in rows if cells not in found and pattern.search(cells[column])]
    return found


METRICS_HEADING = """# Metrics

A run writes these to `metrics.jsonl` and `timings.jsonl`, TensorBoard, W&B and trackio. On a terminal, a
step's line has the short names. A piped log has one line per step, `name=value`; `--verbose` adds the
metrics without a short name. NAME stands for the name of a reward and the like. `grpo-fast metrics NAME`
explains one metric, and `grpo-fast metrics --markdown` writes this page.

| metric | on a terminal | meaning |
|---|---|---|"""


def metrics(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Describe all metrics, or one by its name."""
    from grpo_fast.record.summary import METRICS, metric_of

    found = [*METRICS.values()]
    if args.name:
        one = metric_of(args.name)
        found = [one] if one else [m for m in found if args.name in (m.word, m.name.rpartition("/")[2])]
        found = found or [m for m in METRICS.values() if m.name.startswith(f"{args.name}/")]
    if not found:
        raise ConfigError("metrics", [Problem(args.name, "is no metric; `grpo-fast metrics` lists all")])
    if args.markdown:
        rows = [f"| `{m.name}` | {f'`{m.word}`' if m.word else '-'} | {m.meaning} |" for m in found]
        print(METRICS_HEADING, *rows, sep="\n")
    else:
        print(*(f"{m.name}: {m.meaning}" for m in found), sep="\n")
    return 0


def row(name: str) -> list[str]:
    """Return a key's name, type, default, description, and names in TRL and Axolotl."""
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
    """Return the type of a key, with its bounds."""
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
