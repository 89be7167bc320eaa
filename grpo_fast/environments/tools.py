"""Functions and environment classes that a model may call, and what it is told of them. TRL's contract."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_fast.data.config import VERIFIERS, DatasetConfig
from grpo_fast.lookup import choices, load_callable
from grpo_fast.rewards.calls import event_loop
from grpo_fast.rollout.config import RolloutConfig

logger = logging.getLogger(__name__)
CLOSING = 10.0  # seconds that an async instance has for it
ENVIRONMENT_COLUMN = "environment"  # names a row's environment where there are several
OWN_METHODS = ("reset", "get_reward")  # of an environment: called by the rollout, and no tools


class Instances:
    """An environment's instances, as TRL has them: made where all others play, reset for each completion.

    What they hold is closed when nobody needs them any more.
    """

    def __init__(self, factory: Callable[[], Any], first: Any) -> None:
        self.factory = factory
        self._made, self._usable, self._free = [first], [first], [first]
        self.close = weakref.finalize(self, _close, self._made)

    def begin(self) -> None:
        """All are free again: what they played before is scored."""
        self._free = list(self._usable)

    def take(self) -> Any:
        """A free one; None where one is to be made."""
        return self._free.pop(0) if self._free else None

    def add(self, environment: Any) -> None:
        """One that was made, and is taken."""
        self._made.append(environment)
        self._usable.append(environment)

    def check_reset(self, columns: Iterable[str]) -> None:
        """Whether `reset` fits the columns of a row, the prompt's among them.

        Raises:
            ValueError: it asks for one that is not there, or does not take one that is.
        """
        reset, known = self._made[0].reset, set(columns)
        what = f"{type(self._made[0]).__name__}.reset"
        try:
            parameters = inspect.signature(reset).parameters.values()
        except (TypeError, ValueError):  # not of Python
            return
        for one in parameters:
            named = one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            if named and one.default is one.empty and one.name not in known:
                raise ValueError(
                    f"{what} asks for {one.name!r}, which is no column of the dataset: "
                    f"{choices(one.name, known)}. Rename a column (dataset.rename), or give it a default"
                )
        strange = sorted(known - {one.name for one in parameters})
        if strange and not any(one.kind is one.VAR_KEYWORD for one in parameters):
            raise ValueError(f"{what} does not take the column {strange[0]!r}: add **row to its arguments")

    def drop(self, environment: Any) -> None:
        """One that a call still works on, which was given up: it plays no more."""
        self._usable = [other for other in self._usable if other is not environment]


def _close(environments: Iterable[Any]) -> None:
    """Leave each that is a context manager; of others, close the context managers that they hold.

    So OpenEnv's clients are closed, whose connections hold sessions of the server.
    """

    def managed(value: Any) -> bool:
        return hasattr(value, "__exit__") or hasattr(value, "__aexit__")

    async def ended(work: Any) -> Any:
        return await asyncio.wait_for(work, CLOSING)

    for environment in environments:
        ends: list[Callable[[], Any]] = []
        if managed(environment):
            leave = getattr(environment, "__exit__", None) or environment.__aexit__
            ends.append(partial(leave, None, None, None))
        else:
            held = getattr(environment, "__dict__", {}).values()
            ends += [value.close for value in held if managed(value) and hasattr(value, "close")]
        for end in ends:
            try:
                if inspect.isawaitable(work := end()):
                    closing = asyncio.run_coroutine_threadsafe(ended(work), event_loop("environments"))
                    if asyncio._get_running_loop() is None:  # the loop itself does not wait for itself
                        closing.result()
            except Exception as error:  # of the user's class, or of a server that has gone
                logger.warning("an instance of %s cannot be closed: %r", type(environment).__name__, error)


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
    from grpo_fast.environments.verifiers import Verifiers

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
