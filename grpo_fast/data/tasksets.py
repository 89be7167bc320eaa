"""Read tasks of verifiers as rows, for `dataset.source: verifiers:TASKSET` or `verifiers:ENV+TASKSET`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from grpo_fast.config.data import VERIFIERS, DatasetConfig
from grpo_fast.config.secrets import in_use, masked
from grpo_fast.data.files import Row

if TYPE_CHECKING:
    from verifiers.v1 import EnvConfig

COLUMN = "task"  # the library's data, from which a rollout makes the task


def environment_config(config: DatasetConfig) -> EnvConfig:
    """Return the library's configuration of an environment, whose agents run on this machine.

    By default an agent runs in a subprocess. Its harness is the taskset's or the chat loop `null`, because
    the library's default, `bash`, executes what the model writes.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
        from verifiers.v1.utils.loaders import harness_config_type, resolve_env_config
    except ImportError as error:
        remedy = "needs verifiers 0.4 or newer (Python 3.11): pip install --upgrade 'grpo-fast[verifiers]'"
        raise ImportError(f"dataset.source = {config.source!r} {remedy}") from error
    options = in_use(config.options, "dataset.options")
    env, _, taskset = config.source.removeprefix(VERIFIERS).rpartition("+")
    block = {key: value for key, value in options.items() if key != "select"}
    block |= {"id": env, "taskset": {**block.get("taskset", {}), "id": taskset}}
    try:
        if "renderer" in block:
            raise ValueError("renderer was removed: model.chat_template renders the conversation")
        found = resolve_env_config({**block, "interception": {"type": "server"}})
        null = harness_config_type("null").model_validate({"id": "null"})
        own_harness = vf.default_agent_harness(taskset).id != "bash"
        for name, seat in found:
            if isinstance(seat, vf.AgentConfig):
                if not runtime_is_local(seat.runtime):
                    if "runtime" in options.get(name, {}):
                        raise ValueError(f"{name}.runtime must be on this machine: subprocess or docker")
                    seat.runtime = SubprocessConfig()
                seat.harness = seat.harness or (None if own_harness else null)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        given = f"dataset.source = {config.source!r}, dataset.options = {masked(options)}"
        raise ValueError(f"{given}: {error}") from error
    return found


def task_rows(config: DatasetConfig) -> list[Row]:
    """Return a row for each task, with its prompt to display and the data for the rollout.

    `dataset.options.select` is the library's `select`; `seed` shuffles, and `size` takes the first.
    """
    environment = environment_config(config)
    import verifiers.v1 as vf

    shuffle = {} if config.seed is None else {"shuffle": True, "seed": config.seed}
    tasks = vf.load_taskset(environment.taskset)
    tasks = tasks.select(vf.SelectConfig(**{**shuffle, **config.options.get("select", {})}))
    if config.size is None and not tasks.bounded:
        raise ValueError(f"dataset.source = {config.source!r} has tasks without end: set dataset.size")
    rows = []
    for task in islice(tasks, config.size):
        asked = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        rows.append({config.prompt_column: asked, COLUMN: task.data.model_dump(mode="json")})
    return rows


def library_prompts(datasets: Iterable[DatasetConfig | None]) -> list[list[int]]:
    """Return, for each dataset of verifiers, a prompt of the longest length, to reserve memory."""
    own = (d for d in datasets if d is not None and d.source.startswith(VERIFIERS))
    return [[0] * (dataset.max_prompt_length or 0) for dataset in own]
