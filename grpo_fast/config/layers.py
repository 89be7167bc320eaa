"""Layers of settings: read a file, put flat names in their places, merge and validate."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from grpo_fast.config.foreign.names import NAMES
from grpo_fast.config.foreign.rules import Places, translate
from grpo_fast.config.keys import ConfigError, Problem, problems_of, types_of, unknown_key
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked
from grpo_fast.config.section import short
from grpo_fast.config.tree import flatten, with_leaves
from grpo_fast.config.yaml_text import parse_yaml, surprises

logger = logging.getLogger(__name__)
LENGTH = ("epochs", "max_steps", "num_epochs", "num_train_epochs")  # an override replaces a file's
FREE_FORM = ("options", "rename", "targets", "environment")  # mappings whose keys are the user's


def read_mapping(path: Path, problems: list[Problem] | None = None) -> dict[str, Any]:
    """Read a YAML or JSON file that holds a mapping, or nothing.

    Args:
        problems: gets those of values that YAML reads in unexpected ways.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
        if problems is not None and path.suffix != ".json":
            problems += misread(text)
        document = with_leaves(document, lambda leaf: leaf)  # a copy without shared mappings
    except RecursionError:
        raise ConfigError(str(path), [Problem("the file", "is nested too deeply")]) from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), [Problem("the file", f"cannot be read: {error}")]) from None
    if not isinstance(document, dict | None):
        message = "holds no mapping; write `key: value` lines"
        raise ConfigError(str(path), [Problem("the file", message, document)])
    return {str(key): value for key, value in (document or {}).items()}


def misread(text: str, key: str = "") -> list[Problem]:
    """Return a problem for each value of a text that YAML reads in an unexpected way.

    `yes` for a switch and `1_000` for a number are none. In free-form mappings both get a warning.

    Args:
        key: the key of the override whose value the text is.
    """
    found = []
    for place, line, written, kind, value in surprises(text):
        name = ".".join(filter(None, (key, place)))
        types, shown = types_of(name), masked(written, name)
        ruled = name in NAMES and not types  # its rule checks the value
        wanted = {"switch": {"boolean"}, "number": {"integer", "number"}}.get(kind)
        if wanted and (ruled or types & wanted):
            continue
        quoted = f"{key}='\"{shown}\"'" if key and not place else f"'{shown}'"
        where = "" if key else f"line {line}: "
        is_read = f"YAML reads {shown} as {'a comment' if kind == 'comment' else json.dumps(value)}"
        problem = Problem(name, f"{where}{is_read}; write {quoted} for the text, or {json.dumps(value)}")
        if wanted and not types:
            logger.warning("%s", problem)
        else:
            found.append(problem)
    return found


def merged(layers: Sequence[Places], problems: list[Problem]) -> dict[str, Any]:
    """Return the tree of values at their places, later layers over earlier ones.

    Sections merge; everything else replaces, free-form mappings included. Text passes OmegaConf as bytes,
    since it would interpret `${}` and `???`.
    """
    tree = OmegaConf.create(flags={"allow_objects": True})
    for place, value in (pair for layer in layers for pair in layer.items()):
        held = with_leaves(value, _hidden)
        merge = isinstance(value, Mapping) and place.rpartition(".")[2] not in FREE_FORM
        try:
            OmegaConf.update(tree, place, held, merge=merge, force_add=True)
        except RecursionError:
            problems.append(Problem(place, "is nested too deeply"))
        except OmegaConfBaseException as error:
            problems.append(Problem(place, str(error).partition("\n")[0], value))
    found: Any = OmegaConf.to_container(tree)
    return with_leaves(found, _shown)


def _hidden(leaf: Any) -> Any:
    return leaf.encode("utf-8", "surrogatepass") if isinstance(leaf, str) else leaf


def _shown(leaf: Any) -> Any:
    return leaf.decode("utf-8", "surrogatepass") if isinstance(leaf, bytes) else leaf


def placed(layer: Mapping[str, Any], siblings: Mapping[str, Any], problems: list[Problem]) -> Places:
    """Return a layer's values by our keys, with flat names translated."""
    found: Places = {}
    for name, value in layer.items():
        ours = name.partition(".")[0] in TrainConfig.model_fields
        if not ours and name not in NAMES:
            problems.append(unknown_key(name, value))
            continue
        try:
            places = {name: value} if ours else translate(NAMES[name], value, siblings)
        except (ValueError, TypeError) as error:
            problems.append(Problem(name, str(error), value))
            continue
        earlier = flatten(found)
        for leaf, item in flatten(places).items():
            if leaf in earlier and earlier[leaf] != item:
                both = " and ".join(short(masked(one, leaf)) for one in (earlier[leaf], item))
                problems.append(Problem(leaf, f"is given twice, as {both}; keep one"))
        found |= places
    return found


def validated(tree: Any, source: str, problems: Sequence[Problem] = ()) -> TrainConfig:
    """Validate a configuration.

    Raises:
        ConfigError: `problems`, and all further ones.
    """
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        known = {problem.name: problem for problem in problems}
        for problem in problems_of(error):
            source_of = known.get(problem.name.removeprefix("evaluation."))  # of an inherited value
            if source_of is None or replace(source_of, name=problem.name) != problem:
                known.setdefault(problem.name, problem)
        raise ConfigError(source, [*known.values()]) from None
    if problems:
        raise ConfigError(source, problems)
    return config
