"""The tasks of reasoning-gym: its generators make the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from grpo_fast.data.names import choices

PREFIX = "reasoning_gym:"


def import_reasoning_gym() -> ModuleType:
    """The optional library, or one sentence on how to get it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "tasks and scorers of reasoning-gym need that package (Python 3.11 or newer): "
            "pip install 'grpo-fast[tasks]'"
        ) from error
    return reasoning_gym


def generate_rows(
    task: str, *, seed: int, size: int | None = None, options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows `prompt`, `question`, `answer`, `metadata` and `entry`, the whole item that the scorer needs.

    Item i is drawn from seed + i: two sets whose seeds lie closer than their sizes share items. Space
    seeds by millions, and see `exclude_overlap`.

    Args:
        size: number of items; none: reasoning-gym's default.
        options: the task's own configuration.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown task or option, or a value that the task refuses.
    """
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}: {choices(task, DATASETS)}")
    options = dict(options or {})
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name in ("seed", "size"):
            raise ValueError(f"dataset.options.{name} is set by dataset.{name}; move it there")
        if name not in known:
            raise ValueError(f"dataset.options.{name} is no option of {task}: {choices(name, known)}")
    if size is not None:
        options["size"] = size
    try:
        dataset = create_dataset(task, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} refuses dataset.options = {options}: {error}") from error
    return [_row(dataset[index]) for index in range(len(dataset))]


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": entry["question"],
        "question": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
        "entry": entry,
    }
