"""Functions and environment classes that a model may call, and what it is told of them. TRL's contract."""

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
OWN_METHODS = ("reset", "get_reward")  # of an environment: called by the rollout, and no tools


@dataclass(frozen=True)
class Toolset:
    """What the model may call in a completion of one kind."""

    functions: tuple[Callable[..., Any], ...]
    instances: Instances | None  # of the environment, whose other public methods are tools too
    schemas: tuple[dict[str, Any], ...]  # JSON schemas, as a chat template takes them

    def calls(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """By name, what answers a call."""
        methods = () if environment is None else methods_of(environment)
        return {tool.__name__: tool for tool in (*self.functions, *methods)}


@dataclass(frozen=True)
class Toolsets:
    """The toolsets of a run: one, or one for each environment that rows name."""

    by_name: Mapping[str | None, Toolset]
    classes: tuple[type, ...]  # of the environments
    tasks: DatasetConfig | None = None  # of the verifiers library, which calls its tools itself

    def of(self, row: Mapping[str, Any]) -> Toolset:
        """That of a row.

        Raises:
            ValueError: the row names no environment, or none of these.
        """
        if None in self.by_name:
            return self.by_name[None]
        name = row.get(ENVIRONMENT_COLUMN)
        if name not in self.by_name:
            known = choices(str(name), [str(known) for known in self.by_name])
            raise ValueError(
                f"the column {ENVIRONMENT_COLUMN!r} says {name!r}, which rollout.environment has not: {known}"
            )
        return self.by_name[name]

    def schemas(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a row's prompt tells the model of its tools."""
        return list(self.of(row).schemas)


@dataclass(frozen=True)
class Verifiers:
    """What rewards are given as the environment of an episode of the verifiers library."""

    trace: vf.Trace
    reward: float | None  # None: the episode failed, and nothing scored it

    def get_reward(self) -> float | None:
        return self.reward


def load_toolsets(config: RolloutConfig, dataset: DatasetConfig | None = None) -> Toolsets | None:
    """The tools and environments that `rollout` or the dataset names; None without any. Makes each once.

    Raises:
        ValueError: something that cannot be loaded or made, a tool without types or docstring, two tools of
            one name, or an environment without `reset`; both environments of ours and of verifiers.
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
        raise ValueError(
            f"dataset.source = {dataset.source!r} is an environment with a loop of its own; leave "
            "rollout.tools, rollout.environment and rollout.function out"
        )
    if dataset.max_prompt_length is None:
        raise ValueError(
            f"dataset.source = {dataset.source!r} renders its prompts itself, with its tools: set "
            "dataset.max_prompt_length to the tokens that the longest may have"
        )
    return Toolsets({None: Toolset((), None, ())}, (Verifiers,), dataset)


def methods_of(environment: Any) -> list[Callable[..., Any]]:
    """An environment's tools: its public methods, in the order of their names."""
    functions = inspect.getmembers(
        type(environment), inspect.isfunction
    )  # of an instance, it runs properties
    names = (name for name, _ in functions if name[0] != "_" and name not in OWN_METHODS)
    return [getattr(environment, name) for name in names]


def _made(factory: Callable[[], Any], key: str, path: str) -> Any:
    try:
        environment = factory()
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"{key} = {path!r} cannot be made ({type(error).__name__}: {error})") from error
    if not callable(getattr(environment, "reset", None)):
        raise ValueError(f"{key} = {path!r} has no method reset(**row), which begins a completion; add it")
    return environment


def _schemas(tools: Sequence[Callable[..., Any]], key: str) -> tuple[dict[str, Any], ...]:
    from transformers.utils import get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # one of transformers' own, or of the annotations' evaluation
            raise ValueError(
                f"{key}: the tool {tool.__name__} has no schema ({error}); give every argument a type, and "
                "a line in the docstring's section `Args:`"
            ) from error
    names = [tool.__name__ for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError(f"{key}: two tools have one name: {', '.join(names)}")
    return tuple(schemas)
