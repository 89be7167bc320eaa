"""Load a reward function by its name in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from grpo_fast.config.lookup import choices, load_callable
from grpo_fast.config.rewards import BUILTINS
from grpo_fast.rewards.types import RewardFunction


def load_function(reward: str, options: Mapping[str, Any]) -> tuple[str, RewardFunction, dict[str, Any]]:
    """Return a short name, the callable, and the options to pass at each call.

    Classes, such as the built-ins, are instantiated with the options; functions get them at each call.
    """
    own = ":" in reward or reward.endswith(".py")
    target = load_callable(reward, "reward") if own else _builtin(reward)
    name = reward if not own else getattr(target, "__name__", type(target).__name__).strip("<>")
    parameters = inspect.signature(target).parameters.values()
    known = {parameter.name for parameter in parameters}
    for option in options:
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"reward {reward!r} has no option {option!r}: {choices(option, known)}")
    if not inspect.isclass(target):
        return name, target, dict(options)
    try:
        function = target(**options)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise ValueError(f"options of reward {reward!r}: {problems}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"options of reward {reward!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"reward {reward!r} is a class whose objects cannot be called; give it __call__")
    return name, function, {}


def _builtin(name: str) -> Callable[..., Any]:
    if name in BUILTINS:
        return load_callable(BUILTINS[name], "reward")
    module, dot, function = name.rpartition(".")
    hint = f"{module}:{function}" if dot else f"module:{name}"
    custom = f"a custom function is written {hint} or path/to/file.py:{function}"
    raise ValueError(f"there is no built-in reward {name!r} ({custom}): {choices(name, BUILTINS)}")


def _problem(error: Mapping[str, Any]) -> str:
    place = ".".join(map(str, error["loc"]))
    text = error["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text
