"""`grpo-fast config`: every key of the configuration, what it means, and what other tools call it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from grpo_fast.config.foreign import TABLES, names_of_peers
from grpo_fast.config.foreign.names import NAMES
from grpo_fast.config.foreign.rules import translate
from grpo_fast.config.keys import ConfigError, Problem, keys, unknown_key, without_positions
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.section import LARGEST

TOOLS = tuple(dict.fromkeys(tool for tool, _ in TABLES))
REPEATED = "evaluation.dataset."  # holds what `dataset` holds
KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
HEADING = """# The configuration

A run is a YAML file of these keys, and any of them may follow a command as `key=value`. TRL's and Axolotl's
names are understood in their place; `grpo-fast convert` reads whole files of theirs and NeMo-RL's.
`grpo-fast config KEY` shows one key, a section, or what another tool's name is called here.

`evaluation.dataset` holds the keys of `dataset`. This page is written by
`grpo-fast config --markdown > docs/configuration.md`.
"""


def config(args: argparse.Namespace, _: Sequence[str]) -> int:
    if args.markdown:
        print(markdown(), end="")
        return 0
    names = [name for name in keys() if not name.startswith(REPEATED)] if args.key is None else find(args.key)
    print("\n".join(map(entry, names)))
    return 0


def find(wanted: str) -> list[str]:
    """The keys meant: by name with all that a section holds, by its last part, or by another tool's name.

    Raises:
        ConfigError: there is none; it names the nearest.
    """
    name = without_positions(wanted.strip("-").replace("-", "_"))
    if name in keys():
        return [key for key in keys() if f"{key}.".startswith(f"{name}.")]
    foreign = [
        place
        for place, tools in names_of_peers().items()
        if any(name in (theirs, theirs.rpartition(".")[2]) for names in tools.values() for theirs in names)
    ]
    found = [key for key in keys() if key in foreign or key.rpartition(".")[2] == name]
    if not found:
        problem = unknown_key(name)
        try:
            translate(NAMES.get(name, ""), 1, {})
        except ValueError as error:  # known from elsewhere, without a place here
            problem = Problem(name, str(error))
        raise ConfigError("config", [problem])
    return [key for key in found if not key.startswith(REPEATED)]


def entry(name: str) -> str:
    """A key as the terminal shows it."""
    schema = keys()[name]
    head = f"{name}: {kind(schema)}" + (f" = {default(schema)}" if default(schema) else "")
    peers = [f"{tool}: {', '.join(names)}" for tool, names in names_of_peers().get(name, {}).items()]
    width = max(40, min(110, shutil.get_terminal_size().columns))
    lines = [part for part in (meaning(name), "; ".join(peers)) if part]
    return textwrap.fill(head, width, subsequent_indent="    ") + "".join(
        f"\n{textwrap.fill(line, width, initial_indent='    ', subsequent_indent='    ')}" for line in lines
    )


def markdown() -> str:
    """The whole reference, a table for each section."""
    shown = [name for name in keys() if not name.startswith(REPEATED)]
    leaves = [name for name in shown if kind(keys()[name]) not in ("section", "list of sections")]
    sections = {"": HEADING}

    def section_of(name: str) -> str:
        return name.rpartition(".")[0]

    for section, names in groupby(sorted(leaves, key=section_of), key=section_of):
        columns = ("key", "type", "default", "meaning", *TOOLS)
        rows = [f"\n| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        rows += [_row(name) for name in names]
        title = f"\n## `{section}`\n\n{meaning(section)}\n" if section else ""
        sections[section] = sections.get(section, title) + "\n".join(rows) + "\n"
    return "".join(sections[section] for section in ("", *shown) if section in sections)


def _row(name: str) -> str:
    schema, peers = keys()[name], names_of_peers().get(name, {})
    theirs = [", ".join(f"`{foreign}`" for foreign in peers.get(tool, ())) for tool in TOOLS]
    value = default(schema)
    value = value if value == "required" else f"`{value}`"
    cells = [f"`{name}`", kind(schema), value, meaning(name), *theirs]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def kind(schema: Mapping[str, Any]) -> str:
    """The type of a key, with its bounds."""
    if options := schema.get("anyOf"):
        return " or ".join(map(kind, options))
    if "enum" in schema or "const" in schema:
        return ", ".join(json.dumps(value).strip('"') for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        return "section"
    if schema.get("type") == "array":
        inner = schema.get("items") or schema["prefixItems"][0]
        if "$ref" in inner:
            return "list of sections"
        size = f"{schema['maxItems']}, each " if "maxItems" in schema else ""
        return f"list of {size}{kind(inner)}"
    if schema.get("type") == "object":
        return "mapping"
    if schema.get("type") not in KINDS:
        return str(schema.get("type"))
    named = [(sign, schema[key]) for key, sign in BOUNDS.items() if schema.get(key, LARGEST) != LARGEST]
    return f"{KINDS[schema['type']]} {' and '.join(f'{sign} {bound:g}' for sign, bound in named)}".strip()


def default(schema: Mapping[str, Any]) -> str:
    """As YAML; nothing for a section that is always there."""
    if kind(schema) in ("section", "list of sections"):
        return ""
    return json.dumps(schema["default"]) if "default" in schema else "required"


def meaning(name: str) -> str:
    """What a key is for; of a section without a description the first sentence of its class."""
    if described := keys()[name].get("description"):
        return str(described)
    section: Any = TrainConfig
    for part in name.split("."):
        section = section.model_fields[part].annotation
    return " ".join(str(section.__doc__).split("\n\n")[0].split())
