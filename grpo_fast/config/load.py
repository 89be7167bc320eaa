"""Load a validated `TrainConfig` from a file and overrides, and write it as YAML.

One `ConfigError` lists all problems.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.config.convert import fitted, open_problems, read_foreign, recognized
from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.foreign.conversion import FILL_IN
from grpo_fast.config.foreign.names import NAMES
from grpo_fast.config.foreign.rules import Places
from grpo_fast.config.keys import TO_FILL_IN, ConfigError, Problem, takes_text
from grpo_fast.config.layers import LENGTH, merged, misread, placed, read_mapping, validated
from grpo_fast.config.lookup import choices
from grpo_fast.config.methods import REPLACED
from grpo_fast.config.paths import user_path
from grpo_fast.config.record import CHECKPOINTS_DIR, CONFIG_FILE, INPUTS_DIR, LOCK_FILE
from grpo_fast.config.schema import TrainConfig
from grpo_fast.config.secrets import masked, masked_command
from grpo_fast.config.section import short
from grpo_fast.config.tree import flatten, value_at
from grpo_fast.config.yaml_text import dump_yaml, parse_value
from grpo_fast.objective.catalog import METHODS

logger = logging.getLogger(__name__)
RECIPES = Path(__file__).parents[1] / "recipes"
SHARED = {"warmup_ratio"}  # a flat name that our files use, too
DATASETS = ("dataset", "evaluation.dataset")


def load_config(
    path: str | Path | Places | None, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> TrainConfig:
    """Load and validate a configuration from a YAML file and overrides.

    Args:
        path: a YAML file, a run's folder, the name of a recipe, or None. A file of TRL, Axolotl or NeMo-RL
            is converted, with the outcome of its keys on stderr. A run's folder becomes its output_dir, and
            only overrides set `model.trust_remote_code`. Or values by their dotted keys.
        overrides: `optimizer.learning_rate=1e-6`, `--optimizer.learning_rate=1e-6`, or the latter as two
            items. Values are YAML. `rewards.0.weight=2` sets an item of a list. Flat names of TRL and
            Axolotl (`learning_rate=1e-6`), and names of a converted file, work, too. Or values by names.

    Raises:
        ConfigError: it lists everything that is unknown, contradictory, out of range or to decide.
    """
    problems: list[Problem] = []
    found = None if path is None or isinstance(path, dict) else config_path(path)
    file = path if isinstance(path, dict) else {} if found is None else read_mapping(found, problems)
    if found is not None:
        is_folder, is_run = user_path(str(path)).is_dir(), (found.parent / LOCK_FILE).exists()
        if is_folder and is_run:
            _move(file, found.parent)  # it may have been moved or copied
        if (is_folder or is_run) and isinstance(model := file.get("model"), dict):
            model.pop("trust_remote_code", None)  # someone else may have written it
    given = dict(overrides) if isinstance(overrides, Mapping) else _parse_overrides(overrides)
    source = "the settings" if found is None else str(path)
    if found is None or not (marks := recognized(file)):
        if found and (flat := sorted(file.keys() & NAMES.keys() - TrainConfig.model_fields.keys() - SHARED)):
            message = "%s: read as a file of grpo-fast; %s: names of TRL or Axolotl, without their defaults"
            logger.warning(message, path, ", ".join(flat))
        return validated(_layered(file, given, problems), source, problems)
    # The file is another tool's.
    conversion, ours = read_foreign(found, given)
    conversion, _ = fitted(conversion, lambda file: _layered(file, ours, []))
    tree = _layered(conversion.given, ours, problems)
    if problems := problems + open_problems(conversion, tree):
        by = ", ".join(next(iter(marks.values())))
        raise ConfigError(f"{source}, read as {conversion.source}'s by {by}", problems)
    if os.environ.get("RANK", "0") == "0":
        verbose = bool(given.get("logging.verbose"))
        print(conversion.listing(whole=verbose, settled=True), file=sys.stderr)
    return validated(tree, source)


def _layered(file: Mapping[str, Any], given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Merge overrides over a file's settings."""
    if any(given.get(name) is not None for name in LENGTH):
        file = {name: value for name, value in file.items() if name not in LENGTH}
    # A share of max_steps is one of its final value.
    below, above = (placed(layer, {**file, **given}, problems) for layer in (file, given))
    if (method := above.get("method", below.get("method"))) != below.get("method") and str(method) in METHODS:
        _leave_to_method(method, below)
    tree = merged([below, above], problems)
    given = flatten(above)
    for place in [place for place in DATASETS if f"{place}.source" in given]:
        section = value_at(tree, place)  # drop `split` and the like of the old source
        for key in DatasetConfig.model_construct(source=str(section["source"])).idle_keys:
            if f"{place}.{key}" not in given:
                section.pop(key, None)
    return tree


def check_filled_in(config: TrainConfig) -> None:
    """Raise ConfigError where a converted file still has a mark to fill in."""
    values = flatten(config.model_dump())
    if marked := sorted(name for name, value in values.items() if FILL_IN in repr(value)):
        raise ConfigError("the configuration", [Problem(name, TO_FILL_IN, FILL_IN) for name in marked])


def dump_config(config: TrainConfig) -> str:
    """Return the whole configuration as YAML, with defaults and without secrets."""
    return dump_yaml(masked(config.model_dump()))


def config_path(name: str | Path) -> Path:
    """Return the file of a path, a run's or a checkpoint's folder, or a recipe's name.

    Raises:
        ConfigError: there is none; the message lists the recipes.
    """
    path = user_path(name, "CONFIG")
    recipe = RECIPES / f"{name}.yaml"
    run = path.parent.parent if path.is_dir() and path.parent.name == CHECKPOINTS_DIR else path
    for candidate in (path, run / CONFIG_FILE, *([recipe] if Path(name).name == str(name) else [])):
        if candidate.is_file():
            return candidate
    recipes = choices(path.stem, [file.stem for file in RECIPES.glob("*.yaml")])
    is_folder = f"is a folder without {CONFIG_FILE}, so no run"
    message = is_folder if path.is_dir() else f"is no file, run or recipe: {recipes}"
    raise ConfigError(str(name), [Problem("CONFIG", message, str(name))])


def _move(file: dict[str, Any], run_dir: Path) -> None:
    """Change a run's configuration to the folder where it is now."""
    before, file["output_dir"] = str(file.get("output_dir")), str(run_dir)
    model: Any = file.get("model")
    for key in ("path", "tokenizer") if isinstance(model, dict) else ():
        place = Path(str(model.get(key)))
        if place.parent == Path(before).absolute() / INPUTS_DIR:
            model[key] = str(run_dir.absolute() / INPUTS_DIR / place.name)


def _leave_to_method(method: Any, places: Places) -> None:
    """Drop a file's settings that an override of `method` replaces."""
    replaced = flatten({key: places.pop(key) for key in [*places] if key.partition(".")[0] in REPLACED})
    if replaced:
        listed = " ".join(f"{key}={short(masked(value, key))}" for key, value in replaced.items())
        logger.warning("method = %s replaces %s", method, listed)


def _parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    waiting = iter(tokens)
    for token in waiting:
        name, equals, text = token.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not equals:
            following = next(waiting, "--") if token.startswith("--") else "--"
            if following.startswith("--"):
                raise ConfigError("overrides", [Problem(token, f"is no assignment; write {name}=VALUE")])
            text = following
        if name in given:
            raise ConfigError("overrides", [Problem(name, "is given twice; keep one")])
        given[name] = _parse_value(name, text)
    return given


def _parse_value(name: str, text: str) -> Any:
    """Parse a value as YAML; for a key of text it is the text, unless quoted or null."""
    problems: list[Problem] = []
    try:
        value = parse_value(text)
        if not isinstance(value, str):
            problems = misread(text, name)
    except ValueError as error:
        value, problems = text, [Problem(name, str(error))]
    if takes_text(name):
        quoted = isinstance(value, str) and text.lstrip()[:1] in ("'", '"', "|", ">")
        return value if value is None or quoted else text
    if problems:
        raise ConfigError(masked_command([f"{name}={text}"])[0], problems)
    return value
