"""Paths of the user: expand `~` and variables, and make those of a run absolute."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_fast.config.schema import TrainConfig

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
# Keys without list positions, at the top level and in a stage's overrides.
_DATA = (
    *("model.path", "model.tokenizer", "reference.path"),
    *("dataset.source", "evaluation.dataset.source"),
)
_CODE = (
    *("dataset.transform", "evaluation.dataset.transform"),
    *("rewards.reward", "callbacks", "loss.loss_type", "advantage.function"),
    *("rollout", "rollout.engine", "rollout.tools", "rollout.environment", "rollout.function"),
    *("groups.strategy", "groups.phases.strategy", "groups.embedding"),
    *("groups.criteria.by", "groups.criteria.function", "preference.loss.loss_type"),
)
_CODE_FILE = re.compile(r"(.+\.py)(:.*)?", re.DOTALL)
_MODULE = re.compile(r"(\w+)(:[\w.]+)")
_JINJA = re.compile(r"\{[%{]|\n")


def user_path(written: str | Path, key: str = "path") -> Path:
    """Return the absolute path of a user's text, with `~`, `~user`, `$NAME` and `${NAME}` expanded.

    Args:
        key: the key, argument or option, for errors.

    Raises:
        ValueError: the text is empty, or names a user or a variable that does not exist.
    """
    text = str(written)
    if not text or "\0" in text:
        raise ValueError(f"{key} = {text!r}: is no path; give a file or folder")
    if text[0] != "~" and os.path.lexists(text):  # an existing file with `$` in its name
        return Path(text).absolute()
    for name in (braced or bare for braced, bare in _VARIABLE.findall(text)):
        if name not in os.environ:
            raise ValueError(f"{key} = {text!r}: the environment has no {name}; export {name}")
    text = os.path.expanduser(_VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], text))
    if text.startswith("~") and not os.path.lexists(text):
        user = text.partition("/")[0]
        raise ValueError(f"{key} = {str(written)!r}: {user} is nobody's home here; write ./{text} for a file")
    return Path(text).absolute()


def local_path(written: str, key: str) -> Path | None:
    """Return the path of an existing file or folder; None for a hub id or a generator's name."""
    if "://" in written:
        return None
    path = user_path(written, key)
    return path if os.path.exists(path) or written.startswith(("~", "$")) else None


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Make every path of a configuration absolute, so that it holds in other working directories, too.

    Hub ids, packages and modules stay.

    Raises:
        ValueError: as `user_path`.
    """
    given = config.model_dump(exclude_unset=True) | {"output_dir": config.output_dir}
    return type(config).model_validate(_absolute(given, ""))


def _absolute(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _absolute(item, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_absolute(item, place) for item in value)
    if not isinstance(value, str):
        return value
    key = place.removeprefix("stages.overrides.")
    if key == "output_dir":
        return str(user_path(value, key))
    if key in _DATA or (key == "model.chat_template" and not _JINJA.search(value)):
        return str(local_path(value, key) or value)
    if key in _CODE or key.startswith("rollout.environment."):
        if file := _CODE_FILE.fullmatch(value):
            return f"{user_path(file[1], key)}{file[2] or ''}"
        if (module := _MODULE.fullmatch(value)) and (here := Path(f"{module[1]}.py")).is_file():
            return f"{here.absolute()}{module[2]}"  # importable in this folder only
    return value
