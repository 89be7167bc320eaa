"""Configuration files: YAML and overrides in, one validated `TrainConfig` out, and back to YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_fast.config import TrainConfig
from grpo_fast.config_io import names
from grpo_fast.config_io.errors import ConfigError, Problem, from_validation, short, unknown
from grpo_fast.config_io.foreign_names import RULES
from grpo_fast.config_io.foreign_rules import Moved
from grpo_fast.config_io.yaml_text import dump_yaml, parse_yaml
from grpo_fast.run_record.files import CONFIG_FILE

RECIPES = Path(__file__).parent.parent / "recipes"

Pairs = list[tuple[str, Any]]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A validated configuration from a YAML file and overrides, which win over the file.

    Args:
        path: a YAML file, a run's directory, or the name of a shipped recipe; none: overrides alone.
        overrides: `optimizer.learning_rate=1e-6`, `--optimizer.learning_rate=1e-6`, or the latter as two
            items. Values are YAML. `rewards.0.weight=2` reaches into a list. TRL's and Axolotl's flat
            names (`learning_rate=1e-6`) serve as well, here and at the top level of the file.

    Raises:
        ConfigError: anything unknown, contradictory or out of range; it lists every problem at once.
    """
    source = "overrides" if path is None else str(path)
    problems: list[Problem] = []
    tree: dict[str, Any] = {}
    if path is not None:
        _apply(_read(config_path(path)), tree, problems)
    _apply(parse_overrides(overrides), tree, problems)
    return check_tree(tree, source, problems)


def check_tree(tree: dict[str, Any], source: str, problems: Sequence[Problem] = ()) -> TrainConfig:
    """The configuration that nested mappings hold, unless there are problems already.

    Raises:
        ConfigError: these and all further ones.
    """
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        problems = [*problems, *from_validation(error, tree)]
    if problems:
        raise ConfigError(source, problems)
    return config


def dump_config(config: TrainConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_config` gives the same one back."""
    return dump_yaml(_unshared(config.model_dump()))


def config_path(name: str | Path) -> Path:
    """The file meant by a path, by a run's directory or by the name of a shipped recipe.

    Raises:
        ConfigError: there is none; it names the recipes.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / CONFIG_FILE).is_file():
        return path / CONFIG_FILE
    recipe = RECIPES / f"{name}.yaml"
    if path.name == str(name) and recipe.is_file():
        return recipe
    known = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    near = difflib.get_close_matches(path.stem, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(known)}"
    raise ConfigError(str(name), [Problem("CONFIG", f"is no file, no run and no recipe; {hint}", str(name))])


def parse_overrides(tokens: Sequence[str]) -> Pairs:
    """Names and values of overrides, in order.

    Raises:
        ConfigError: a token that is no assignment, or a `--name` without a value.
    """
    pairs, waiting = [], iter(tokens)
    for token in waiting:
        name, equals, text = token.removeprefix("--").partition("=")
        if not equals:
            value = next(waiting, None) if token.startswith("--") else None
            if value is None or value.startswith("--"):
                message = f"is no assignment; write {name.replace('-', '_')}=VALUE"
                raise ConfigError("overrides", [Problem(token, message)])
            text = value
        pairs.append((name.replace("-", "_"), parse_yaml(text, token)))
    return pairs


def _read(path: Path) -> Pairs:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [Problem(str(path), f"cannot be read: {error}")]) from None
    document = parse_yaml(text, str(path))
    if document is None:
        return []
    if not isinstance(document, dict):
        problem = Problem("the file", "holds no mapping; write `key: value` lines", document)
        raise ConfigError(str(path), [problem])
    return [(str(key), value) for key, value in document.items()]


def _apply(pairs: Pairs, tree: dict[str, Any], problems: list[Problem]) -> None:
    """Put one layer's keys at their places in the tree, over what an earlier layer put there."""
    siblings = dict(pairs)
    written: dict[str, tuple[str, Any]] = {}  # the leaf's place -> who wrote it in this layer, and what
    for name, value in pairs:
        for place, item in _places(name, value, siblings, problems):
            for leaf, leaf_value in _leaves(place, item):
                earlier = written.setdefault(leaf, (name, leaf_value))
                if earlier[1] != leaf_value:
                    problems.append(_contradiction(leaf, earlier, (name, leaf_value)))
            try:
                _put(tree, place, _unshared(item))
            except ValueError as error:
                problems.append(Problem(name, str(error), value))


def _places(name: str, value: Any, siblings: Mapping[str, Any], problems: list[Problem]) -> Pairs:
    """Where a key's value belongs: where it says, or where the table of foreign names puts it."""
    if names.exists(name):
        return [(name, value)]
    rule = RULES.get(name)
    if rule is None:
        problems.append(unknown(name, value))
        return []
    if isinstance(rule, Moved):
        try:
            return list(rule.translate(value, siblings).items())
        except (ValueError, TypeError) as error:
            problems.append(Problem(name, str(error), value))
    elif value not in rule.harmless:
        problems.append(Problem(name, f"has no place here: {rule.reason}", value))
    return []


def _leaves(place: str, value: Any) -> Pairs:
    if not isinstance(value, dict):
        return [(place, value)]
    return [leaf for key, item in value.items() for leaf in _leaves(f"{place}.{key}", item)]


def _contradiction(place: str, one: tuple[str, Any], other: tuple[str, Any]) -> Problem:
    said = [f"{name} says {short(value)}" for name, value in (one, other)]
    return Problem(place, f"is given twice: {' and '.join(said)}; keep one")


def _put(tree: dict[str, Any], place: str, value: Any) -> None:
    """Set the value at a dotted place; a section's keys are merged into those already there.

    Raises:
        ValueError: the way there leads through a value, or past the end of a list.
    """
    *way, last = place.split(".")
    node: Any = tree
    for i, part in enumerate(way):
        here = ".".join(way[: i + 1])
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[_key(node, part, here)]
        if not isinstance(node, dict | list):
            raise ValueError(f"{here} is {short(node)} and holds no keys; set the whole of {here}")
    key = _key(node, last, place)
    below = node.get(key) if isinstance(node, dict) else node[key]
    node[key] = _merged(place, below, value)


def _key(node: dict[str, Any] | list[Any], part: str, place: str) -> str | int:
    if isinstance(node, dict):
        return part
    if part.isdigit() and int(part) < len(node):
        return int(part)
    raise ValueError(
        f"{place.rpartition('.')[0]} has {len(node)} items, counted from 0, and none is `{part}`"
    )


def _merged(place: str, below: Any, above: Any) -> Any:
    """`above` over `below`, key by key in sections; a mapping with keys of the user's choice is replaced."""
    field = names.fields().get(place)
    if not (isinstance(below, dict) and isinstance(above, dict)) or (field and field.free_form):
        return above
    return below | {key: _merged(f"{place}.{key}", below.get(key), item) for key, item in above.items()}


def _unshared(value: Any) -> Any:
    """A copy in plain lists and mappings, in which no two places are one object, as aliases make them."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list | tuple) else value
