"""Reads a foreign configuration, tells what it is, converts it, and checks the outcome."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_fast.config_io import ConfigError, Problem, check_tree
from grpo_fast.config_io.yaml_text import parse_yaml
from grpo_fast.convert.axolotl import convert_axolotl
from grpo_fast.convert.conversion import Conversion
from grpo_fast.convert.nemo_rl import convert_nemo_rl
from grpo_fast.convert.references import with_defaults
from grpo_fast.convert.trl import convert_trl

CONVERTERS = {"axolotl": convert_axolotl, "trl": convert_trl, "nemo_rl": convert_nemo_rl}


def convert_file(path: str | Path, *, source: str | None = None) -> Conversion:
    """Convert a YAML or JSON file; see `convert`.

    Raises:
        ConfigError: the file cannot be read, or what it says is refused here; it lists every problem.
    """
    document = with_defaults(read_document(Path(path)), Path(path).parent, read_document)
    return convert(document, source=source)


def convert(document: Mapping[str, Any], *, source: str | None = None) -> Conversion:
    """Our configuration from a foreign one, with an account of each key.

    Args:
        document: the foreign configuration as plain data.
        source: `axolotl`, `trl` or `nemo_rl`; none: told by the keys.

    Raises:
        ConfigError: values that are refused here, such as contradicting ones; it lists every problem.
    """
    conversion = CONVERTERS[source or recognise(document)](document)
    check_tree(conversion.tree(), f"the configuration converted from {conversion.source}")
    return conversion


def recognise(document: Mapping[str, Any]) -> str:
    """Whose configuration this is.

    Raises:
        ConfigError: it is ours already.
    """
    if all(isinstance(document.get(section), Mapping) for section in ("model", "dataset")):
        message = "has our sections model and dataset already; `grpo-fast train` takes it as it is"
        raise ConfigError("convert", [Problem("FILE", message)])
    if isinstance(document.get("algorithm"), Mapping) or isinstance(document.get("policy"), Mapping):
        return "nemo_rl"
    if isinstance(document.get("grpo"), Mapping) or isinstance(document.get("dpo"), Mapping):
        return "nemo_rl"
    return "axolotl" if {"base_model", "rl", "trl"} & set(document) else "trl"


def read_document(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else parse_yaml(text, str(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(str(path), [Problem("the file", f"cannot be read: {error}")]) from None
    if not isinstance(document, dict):
        raise ConfigError(str(path), [Problem("the file", "holds no mapping of keys to values")])
    return {str(key): value for key, value in document.items()}
