"""From a name in the configuration to a function."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from grpo_fast.lookup import choices
from grpo_fast.rewards.builtins import BUILTINS
from grpo_fast.rewards.types import RewardFunction


def load_function(reward: str, options: Mapping[str, Any]) -> tuple[str, RewardFunction, dict[str, Any]]:
    """A short name, the callable, and the options that are left to pass at each call.

    Built-ins and other classes are made with the options; those of a function are passed to it.

    Raises:
        ValueError: no such built-in, module, file or function, or options that it does not take.
    """
    if ":" in reward:
        target = _import(reward)
        name = getattr(target, "__name__", None) or type(target).__name__
    else:
        target, name = _builtin(reward), reward
    if inspect.isclass(target):
        return name, _make(reward, target, options), {}
    if not callable(target):
        raise ValueError(f"reward {reward!r} is {type(target).__name__}, which cannot be called")
    _check_options(reward, target, options)
    return name, target, dict(options)


def _builtin(name: str) -> type:
    if name in BUILTINS:
        return BUILTINS[name]
    module, dot, function = name.rpartition(".")
    hint = f"{module}:{function}" if dot else f"module:{name}"
    raise ValueError(
        f"there is no built-in reward {name!r} (a function of your own is written {hint} or "
        f"path/to/file.py:{function}): {choices(name, BUILTINS)}"
    )


def _import(reward: str) -> Any:
    place, _, attribute = reward.rpartition(":")
    module = _import_file(place) if place.endswith(".py") else _import_module(place, attribute)
    if not hasattr(module, attribute):
        public = [
            name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
        ]
        raise ValueError(f"{place} has no {attribute!r}: {choices(attribute, public)}")
    return getattr(module, attribute)


def _import_module(name: str, attribute: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"cannot import {name!r} for the reward {name}:{attribute}: {error}. A file that is not "
            f"installed is given by its path: path/to/file.py:{attribute}"
        ) from error


def _import_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {place!r} to take a reward from (looked for {path})")
    name = f"grpo_fast_reward_{path.stem}_{abs(hash(str(path))):x}"
    module = sys.modules[name] = ModuleType(name)  # dataclasses and typing look a class's module up there
    module.__file__ = str(path)
    try:
        SourceFileLoader(name, str(path)).exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"cannot load {place!r}: {type(error).__name__}: {error}") from error
    return module


def _make(reward: str, made: type, options: Mapping[str, Any]) -> RewardFunction:
    _check_options(reward, made, options)
    try:
        instance = made(**options)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise ValueError(f"options of reward {reward!r}: {problems}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"options of reward {reward!r}: {error}") from error
    if not callable(instance):
        raise ValueError(f"reward {reward!r} is a class whose objects cannot be called; give it __call__")
    return instance


def _problem(error: Mapping[str, Any]) -> str:
    place = ".".join(map(str, error["loc"]))
    text = error["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def _check_options(reward: str, target: RewardFunction, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters}
    for name in options:
        if name not in known:
            raise ValueError(f"reward {reward!r} has no option {name!r}: {choices(name, known)}")
