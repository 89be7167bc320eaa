"""Tasks of the verifiers library as rows: `dataset.source: verifiers:TASKSET`, or `verifiers:ENV+TASKSET`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo_fast.config.data import VERIFIERS, DatasetConfig
from grpo_fast.config.secrets import in_use, masked
from grpo_fast.data.files import Row

if TYPE_CHECKING:
    from verifiers.v1 import AgentConfig, EnvConfig

COLUMN = "task"  # of a row: the library's data of it, which a rollout makes the task of
NEEDED = "0.4"  # of the library
OUTSIDE = ("renderer", "select")  # options that are no part of the library's `env` block


def import_verifiers() -> ModuleType:
    """The optional library, or one sentence on how to get it."""
    try:
        import verifiers.v1
    except ImportError as error:
        if error.name == "verifiers.v1":
            raise ImportError(
                f"dataset.source = '{VERIFIERS}…' needs verifiers {NEEDED} or newer, which has verifiers.v1, "
                "and an older one is installed: pip install --upgrade 'grpo-fast[verifiers]'"
            ) from error
        raise ImportError(
            f"dataset.source = '{VERIFIERS}…' needs that library (Python 3.11 or newer): "
            "pip install 'grpo-fast[verifiers]'"
        ) from error
    return verifiers.v1


def environment_config(source: str, options: Mapping[str, Any]) -> EnvConfig:
    """The library's configuration of an environment, whose agents run on this machine.

    An agent runs in a subprocess unless the options or the environment choose another runtime of this
    machine, and by the library's chat loop (`null`, which runs nothing that the model writes) where neither
    the options nor the taskset bring a harness.

    Raises:
        ImportError: verifiers is not installed.
        ValueError: there is no such environment, or an option that it does not take.
    """
    vf = import_verifiers()
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
    from verifiers.v1.utils.loaders import harness_config_type, resolve_env_config

    options = in_use(options, "dataset.options")
    env, _, taskset = source.removeprefix(VERIFIERS).rpartition("+")
    block = {key: value for key, value in options.items() if key not in OUTSIDE}
    block |= {"id": env, "taskset": {**block.get("taskset", {}), "id": taskset}}
    try:
        config = resolve_env_config(block)
        null = harness_config_type("null").model_validate({"id": "null"})
        default = vf.default_agent_harness(taskset)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        module = taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        if hasattr(sys.modules.get(module), "load_environment"):  # the way before tasksets
            raise ValueError(
                f"dataset.source = {source!r} is a module for verifiers before v1, with load_environment; it "
                f"needs one for verifiers {NEEDED} or newer, which exports a Taskset: upgrade {taskset}"
            ) from error
        raise ValueError(
            f"dataset.source = {source!r}, dataset.options = {masked(options)}: {error}"
        ) from error

    def here(name: str, seat: AgentConfig) -> AgentConfig:
        runtime, harness = seat.runtime, seat.harness
        if not runtime_is_local(runtime):
            if "runtime" in options.get(name, {}):
                raise ValueError(
                    f"dataset.options.{name}.runtime = {runtime.type!r} is on another machine, from which "
                    "the engine cannot be reached; choose subprocess or docker"
                )
            runtime = SubprocessConfig()
        if harness is None and default.id == "bash":
            harness = null
        return seat.model_copy(update={"runtime": runtime, "harness": harness})

    seats = {name: here(name, seat) for name, seat in agent_config_fields(config).items()}
    return config.model_copy(update=seats)


def task_rows(config: DatasetConfig) -> list[Row]:
    """A row of each task: its prompt, for people to read, and what a rollout makes it of.

    `dataset.options.select` chooses as the library's `select` does, `seed`, where it is given, shuffles, and
    `size` takes the first.

    Raises:
        ValueError: as `environment_config`; a taskset without end, and no `size`.
    """
    vf = import_verifiers()
    options = config.options
    environment = environment_config(config.source, options)
    shuffle = {"shuffle": True, "seed": config.seed} if "seed" in config.model_fields_set else {}
    try:
        tasks = vf.load_taskset(environment.taskset)
        tasks = tasks.select(vf.SelectConfig(**{**shuffle, **options.get("select", {})}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"dataset.source = {config.source!r}: {error}") from error
    if config.size is None and not tasks.bounded:
        raise ValueError(f"dataset.source = {config.source!r} has tasks without end: set dataset.size")
    rows = []
    for task in islice(tasks, config.size):
        data = task.data.model_dump(mode="json")
        asked = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        rows.append({config.prompt_column: asked, COLUMN: data})
    return rows


def library_prompts(datasets: Iterable[DatasetConfig | None]) -> list[list[int]]:
    """A prompt as long as any that the library may render itself, for whoever keeps room for the longest."""
    own = (d for d in datasets if d is not None and d.source.startswith(VERIFIERS))
    return [[0] * (dataset.max_prompt_length or 0) for dataset in own]
