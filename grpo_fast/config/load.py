"""Configuration files: files and overrides in, one validated `TrainConfig` out, and back to YAML.

One `ConfigError` lists everything that is wrong, with the nearest names to a name that does not exist.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_fast.config.foreign import Conversion, convert
from grpo_fast.config.foreign.conversion import FILL_IN
from grpo_fast.config.foreign.names import NAMES
from grpo_fast.config.foreign.references import with_defaults
from grpo_fast.config.foreign.rules import translate
from grpo_fast.config.keys import (
    TO_FILL_IN,
    ConfigError,
    Problem,
    free_form,
    is_key,
    keys,
    problems_of,
    unknown_key,
    without_positions,
)
from grpo_fast.config.lookup import choices
from grpo_fast.config.methods import method_remarks, without_sections
from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE, INPUTS_DIR, LOCK_FILE
from grpo_fast.config.schema import TrainConfig, ignored_keys
from grpo_fast.config.secrets import masked, masked_command
from grpo_fast.config.section import short
from grpo_fast.config.stages import PARTIAL
from grpo_fast.config.tree import flatten, value_at, with_value, without
from grpo_fast.config.yaml_text import YamlError, dump_yaml, parse_yaml
from grpo_fast.objective.catalog import METHODS

logger = logging.getLogger(__name__)
RECIPES = Path(__file__).parents[1] / "recipes"
Pairs = list[tuple[str, Any]]


def load_config(path: str | Path | None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> TrainConfig:
    """A validated configuration from a YAML file and overrides, which win over the file.

    Args:
        path: a YAML file, a run's directory, or the name of a shipped recipe; None for overrides alone. A
            run's directory is its output_dir, wherever it was when the run was started.
        overrides: `optimizer.learning_rate=1e-6`, `--optimizer.learning_rate=1e-6`, or the latter as two
            items. Values are YAML. `rewards.0.weight=2` reaches into a list. The flat names of
            TRL and Axolotl (`learning_rate=1e-6`) serve as well, here and at the top
            level of the file. Or names with their values as Python has them. What the file sets and is
            not read beside them is left out.

    Raises:
        ConfigError: anything unknown, contradictory or out of range; it lists every problem at once.
    """
    problems: list[Problem] = []
    file: Pairs = [] if path is None else list(_read_mapping(found := config_path(path)).items())
    if path is not None and Path(path).is_dir() and (found.parent / LOCK_FILE).exists():
        file = list(_in_folder(dict(file), found.parent).items())
    if isinstance(overrides, Mapping):
        source, pairs = "settings", list(overrides.items())
    else:
        source, pairs = "overrides", _parse_overrides(overrides)
    length = {"epochs", "max_steps"}
    if len(given := length & _apply(pairs, {}, dict(pairs), []).keys()) == 1:  # says it in the file's place
        file = [(key, value) for key, value in file if key not in length - given]
    # A value relative to another key (a share of max_steps) is relative to that key's final value.
    siblings = {**dict(file), **dict(pairs)}
    below = _apply(file, {}, siblings, problems)
    method = dict(pairs).get("method", below.get("method"))
    if method != below.get("method") and str(method) in METHODS:
        below = _for_another_method(below, method)
    return _validated(_apply(pairs, below, siblings, problems), str(path or source), problems, below)


def convert_file(path: str | Path, *, source: str | None = None) -> tuple[Conversion, str]:
    """(what became of each key of a foreign file, our YAML); `source` as for `convert`.

    Args:
        path: YAML or JSON.

    Raises:
        ConfigError: the file cannot be read, or holds no foreign configuration.
    """
    path = Path(path)
    document = with_defaults(_read_foreign(path), path.parent, _read_mapping)
    try:
        conversion = convert(document, source=source)
    except ValueError as error:
        raise ConfigError(str(path), [Problem("the file", str(error))]) from None
    while True:
        tree: Any = {}
        for place, value in conversion.places.items():
            tree = with_value(tree, place, value, free_form)
        try:
            unmarked = {key: value for key, value in tree.items() if (key, value) != ("max_steps", FILL_IN)}
            _validated(unmarked, f"the configuration converted from {conversion.source}", [])
        except ConfigError as error:
            found = [(_blamed(problem, conversion.places), str(problem)) for problem in error.problems]
            refused = {place: reason for places, reason in found for place in places}
            if not refused:
                raise
            conversion = conversion.without(refused)
        else:
            return conversion, conversion.heading() + dump_yaml(tree)


def _read_foreign(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml", ".json"):
        return _read_mapping(path)
    message = "is none of .yaml, .yml and .json; write a command's flags as lines `key: value`"
    raise ConfigError(str(path), [Problem("the file", message)])


def _blamed(problem: Problem, places: Mapping[str, Any]) -> list[str]:
    """The places of converted values that are refused.

    A problem's own, or what its message begins with, else what the problem lies in, or is missing beside.
    """
    start, section = problem.message.partition(" ")[0], problem.name.rpartition(".")[0]
    named = [name for name in (problem.name, start, f"{problem.name}.{start}") if name in places]
    return named[:1] or [place for place in places if section and f"{place}.".startswith(f"{section}.")]


def check_filled_in(config: TrainConfig) -> None:
    """Raises ConfigError where a converted file has a mark that nobody has replaced."""
    marked = {name for name, value in flatten(config.model_dump()).items() if FILL_IN in repr(value)}
    if marked:
        raise ConfigError(
            "the configuration", [Problem(name, TO_FILL_IN, FILL_IN) for name in sorted(marked)]
        )


def dump_config(config: TrainConfig) -> str:
    """The whole configuration as YAML, defaults included; `load_config` gives the same one back, without
    secrets that are written there.

    A comment marks what came from the method, and what is set otherwise.
    """
    lines, section, remarks = [], "", method_remarks(config)
    for line in dump_yaml(masked(config.model_dump())).splitlines():
        key = line.partition(":")[0]
        section = section if line.startswith(" ") else f"{key}."
        remark = remarks.get(key if section == f"{key}." else f"{section}{key.removeprefix('  ')}")
        lines.append(f"{line}  # {remark}" if remark else line)
    return "\n".join([*lines, ""])


def config_path(name: str | Path) -> Path:
    """The file meant by a path, by a run's or a checkpoint's directory or by the name of a shipped recipe.

    Raises:
        ConfigError: there is none; it names the recipes.
    """
    path = Path(name)
    recipe = RECIPES / f"{name}.yaml"
    run = path.parent.parent if path.is_dir() and path.parent.name == CHECKPOINTS_DIR else path
    for candidate in (path, run / CONFIG_FILE, *([recipe] if path.name == str(name) else [])):
        if candidate.is_file():
            return candidate
    if path.is_dir():
        message = f"is a folder without {CONFIG_FILE}, so no run"
        raise ConfigError(str(name), [Problem("CONFIG", message, str(name))])
    recipes = choices(path.stem, [file.stem for file in RECIPES.glob("*.yaml")])
    raise ConfigError(str(name), [Problem("CONFIG", f"is no file, run or recipe: {recipes}", str(name))])


def _in_folder(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of a run whose folder, with the rows that it keeps, may have been copied or moved."""
    kept = Path(str(tree.get("output_dir"))) / INPUTS_DIR
    tree = tree | {"output_dir": str(folder)}
    for place in ("dataset.source", "evaluation.dataset.source"):
        if Path(str(value_at(tree, place))).parent == kept:
            moved = str(folder / INPUTS_DIR / Path(value_at(tree, place)).name)
            tree = with_value(tree, place, moved, free_form)
    return tree


def _validated(tree: Any, source: str, problems: Sequence[Problem], below: Any = None) -> TrainConfig:
    """The configuration that nested mappings hold, unless there are problems already.

    Args:
        below: an earlier layer, whose keys are left out where the ones above it leave them unread: so another
            dataset leaves the `split` of the one before behind, and none at all leaves `evaluation.every`.

    Raises:
        ConfigError: these and all further ones.
    """
    try:
        config = TrainConfig.model_validate(tree)
        if not problems:
            return config
    except ValidationError as error:
        idle = [".".join(map(str, one["loc"])) for one in error.errors() if one["type"] == "ignored"]
        if left := _read_alone(below, [key for key in idle if value_at(below, key) == value_at(tree, key)]):
            return _validated(reduce(without, left, tree), source, problems)
        problems = [*problems, *problems_of(error, tree)]
    raise ConfigError(source, problems)


def _read_alone(layer: Any, names: Sequence[str]) -> list[str]:
    """Of the keys that a layer sets those that it would read if there were no other."""
    try:
        idle = ignored_keys(TrainConfig.model_validate(layer, context=PARTIAL)) if names else {}
    except ValueError:  # the layer is no whole configuration
        return []
    return [name for name in names if name not in idle]


def _apply(pairs: Pairs, tree: Any, siblings: Mapping[str, Any], problems: list[Problem]) -> Any:
    """The tree with one layer's keys at their places, over what an earlier layer put there.

    A key belongs where it says, or where the table of foreign names puts it.
    """
    written: dict[str, tuple[str, Any]] = {}  # leaf -> the name that set it in this layer, and its value
    for name, value in pairs:
        if not is_key(name) and name not in NAMES:
            problems.append(unknown_key(name, value))
            continue
        try:
            places = {name: value} if is_key(name) else translate(NAMES[name], value, siblings)
            for leaf, item in flatten(places).items():
                writer, earlier = written.setdefault(leaf, (name, item))
                if earlier is not item and earlier != item:
                    said = " and ".join(
                        f"{who} says {short(masked(what, leaf))}"
                        for who, what in ((writer, earlier), (name, item))
                    )
                    problems.append(Problem(leaf, f"is given twice: {said}; keep one"))
            for place, item in places.items():
                tree = with_value(tree, place, item, free_form)
        except (ValueError, TypeError) as error:
            problems.append(Problem(name, str(error), value))
    return tree


def _for_another_method(tree: dict[str, Any], method: Any) -> dict[str, Any]:
    """A file's settings without what a method that is given beside it replaces."""
    kept = without_sections(tree)
    replaced = flatten({key: tree[key] for key in tree.keys() - kept.keys()})
    if replaced:
        listed = " ".join(f"{key}={short(masked(value, key))}" for key, value in replaced.items())
        logger.warning("method = %s replaces %s", method, listed)
    return kept


def _parse_overrides(tokens: Sequence[str]) -> Pairs:
    """Names and values of overrides, in order.

    Raises:
        ConfigError: a token that is no assignment, or a `--name` without a value.
    """
    pairs, waiting = [], iter(tokens)
    for token in waiting:
        name, equals, text = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not equals:
            value = next(waiting, None) if token.startswith("--") else None
            if value is None or value.startswith("--"):
                raise ConfigError("overrides", [Problem(token, f"is no assignment; write {name}=VALUE")])
            text = value
        shown = masked_command([f"{name}={text}"])[0]
        pairs.append((name, _parse_override(name, text, shown)))
    return pairs


def _parse_override(name: str, text: str, token: str) -> Any:
    """As YAML; for a key of text alone, what is no single value there is the text, as `{question}?`."""
    schema = keys().get(without_positions(name), {})
    is_text = {kind.get("type") for kind in schema.get("anyOf", [schema])} <= {"string", "null"}
    try:
        value = _parsed(text, token)
    except ConfigError:
        if is_text:
            return text
        raise
    return text if is_text and isinstance(value, dict | list) else value


def _read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping, or nothing."""
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else _parsed(text, source)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(source, [Problem("the file", "is nested too deeply")]) from None
    except (OSError, ValueError) as error:
        raise ConfigError(source, [Problem("the file", f"cannot be read: {error}")]) from None
    if not isinstance(document, dict | None):
        raise ConfigError(
            source, [Problem("the file", "holds no mapping; write `key: value` lines", document)]
        )
    return {str(key): value for key, value in (document or {}).items()}


def _parsed(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except YamlError as error:
        raise ConfigError(source, [Problem(error.place or source, str(error))]) from None
