"""Load tools and environment classes, as in TRL, and the schemas that the model reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import VERIFIERS, DatasetConfig
from grpo_fast.config.lookup import choices, load_callable
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.environments.instances import Instances

if TYPE_CHECKING:
    import verifiers.v1 as vf

ENVIRONMENT_COLUMN = "environment"  # names a row's environment where there are several
OWN_METHODS = ("reset", "get_reward")  # of an environment; called by the rollout, not tools


@dataclass(frozen=True)
class Toolset:
    """The tools of one environment, or of a run without environments."""

    functions: tuple[Callable[..., Any], ...]
    instances: Instances | None  # of the environment, whose public methods are tools, too
    schemas: tuple[dict[str, Any], ...]  # JSON schemas for the chat template

    def calls(self, environment: Any) -> dict[str, Callable[..., Any]]:
        methods = () if environment is None else methods_of(environment)
        return {tool.__name__: tool for tool in (*self.functions, *methods)}


@dataclass(frozen=True)
class Toolsets:
    """The toolsets of a run: one, or one for each environment that rows name."""

    by_name: Mapping[str | None, Toolset]
    classes: tuple[type, ...]  # the environments
    tasks: DatasetConfig | None = None  # of verifiers, which calls its tools itself

    def of(self, row: Mapping[str, Any]) -> Toolset:
        """Return a row's toolset; raise ValueError if the row names no known environment."""
        if None in self.by_name:
            return self.by_name[None]
        name = row.get(ENVIRONMENT_COLUMN)
        if name not in self.by_name:
            known = choices(str(name), [str(known) for known in self.by_name])
            problem = f"the column {ENVIRONMENT_COLUMN!r} has {name!r}, which rollout.environment lacks"
            raise ValueError(f"{problem}: {known}")
        return self.by_name[name]

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(self.of(row).schemas)


@dataclass(frozen=True)
class Verifiers:
    """The environment that rewards get for an episode of verifiers."""

    trace: vf.Trace
    reward: float | None  # None: the episode failed before it was scored

    def get_reward(self) -> float | None:
        return self.reward


def load_toolsets(config: RolloutConfig, dataset: DatasetConfig | None = None) -> Toolsets | None:
    """Load the tools of `rollout` or of the dataset, and make each environment once; None without any.

    Raises ValueError for tools and environments that cannot be loaded or described to the model.
    """
    if dataset is not None and dataset.source.startswith(VERIFIERS):
        return _tasks_of_library(config, dataset)
    if not config.has_turns:
        return None
    functions = tuple(load_callable(path, "rollout.tools") for path in config.tools)
    given = config.environment
    named = given if isinstance(given, dict) else {None: given}
    by_name: dict[str | None, Toolset] = {}
    classes: dict[type, None] = {}
    for name, path in named.items():
        key = "rollout.environment" if name is None else f"rollout.environment.{name}"
        instances, tools = None, list(functions)
        if path is not None:
            factory = load_callable(path, key)
            probe = _made(factory, key, path)
            instances = Instances(factory, probe)
            classes[type(probe)] = None
            tools += methods_of(probe)
        by_name[name] = Toolset(functions, instances, _schemas(tools, key))
    return Toolsets(by_name, tuple(classes))


def _tasks_of_library(config: RolloutConfig, dataset: DatasetConfig) -> Toolsets:
    if config.has_turns or config.function is not None:
        unused = "rollout.tools, rollout.environment and rollout.function"
        raise ValueError(f"dataset.source = {dataset.source!r} is a complete environment; remove {unused}")
    if dataset.max_prompt_length is None:
        limit = "set dataset.max_prompt_length to the most tokens of a prompt with its tools"
        raise ValueError(f"dataset.source = {dataset.source!r} renders its prompts itself: {limit}")
    return Toolsets({None: Toolset((), None, ())}, (Verifiers,), dataset)


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """Return an environment's tools: its public methods, sorted by name."""
    functions = inspect.getmembers(type(environment), inspect.isfunction)  # an instance would run properties
    names = (name for name, _ in functions if name[0] != "_" and name not in OWN_METHODS)
    return [getattr(environment, name) for name in names]


def _made(factory: Callable[[], Any], key: str, path: str) -> Any:
    try:
        environment = factory()
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{key} = {path!r} cannot be made ({type(error).__name__}: {error})") from error
    if not callable(getattr(environment, "reset", None)):
        raise ValueError(f"{key} = {path!r} needs a method reset(**row), which begins a completion; add it")
    return environment


def _schemas(tools: Sequence[Callable[..., Any]], key: str) -> tuple[dict[str, Any], ...]:
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # evaluating annotations may raise anything
            remedy = "give every argument a type, and a line in the docstring's section `Args:`"
            raise ValueError(f"{key}: the tool {tool.__name__} has no schema ({error}); {remedy}") from error
    names = [tool.__name__ for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"{key}: two tools have one name: {', '.join(names)}")
    return tuple(schemas)
