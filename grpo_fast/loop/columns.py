"""The columns that a custom loss reads: checked before training, and put beside a step's completions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from grpo_fast.config.lookup import choices
from grpo_fast.config.section import short
from grpo_fast.data import PromptDataset
from grpo_fast.data.files import row_named
from grpo_fast.data.table import CompletionTable
from grpo_fast.objective.types import KNOWN_COLUMNS
from grpo_fast.rewards.types import column_names

EXTRA = "extra/"  # before the names of columns that rewards have logged
LOSS_COLUMN = "column/"  # before the names of `loss.columns`, as facts


def check_loss_columns(dataset: PromptDataset, names: Iterable[str], key: str = "loss.columns") -> None:
    """Raise ValueError where a column that a custom loss reads has no place, or is no number in some row.

    One of `loss.columns` that no row has is to be logged by a reward: `with_loss_columns` looks for it.
    """
    held = column_names(dataset)
    for name in names:
        if name in KNOWN_COLUMNS:
            raise ValueError(
                f"{key} names {name!r}, which has a meaning in LossInputs; rename it by dataset.rename"
            )
        for prompt in dataset if name in held or key != "loss.columns" else ():
            with row_named(dataset.config, prompt.index):
                finite_number(prompt.columns.get(name), f"{key}: {name}", held)


def finite_number(value: Any, what: str, known: Iterable[str]) -> float:
    """A value of a column that a loss reads; raises ValueError for anything but a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        name = what.rpartition(" ")[2]
        raise ValueError(
            f"{what} = {short(value)} is not a finite number; give one in each row, or name another column: "
            f"{choices(name, known)}"
        )
    return float(value)


def with_loss_columns(table: CompletionTable, names: Iterable[str]) -> CompletionTable:
    """With the facts (S,) that `loss.columns` names: of each completion's prompt, or logged by a reward.

    Raises:
        ValueError: a column that neither the data nor a reward has, or a logged value that is no number.
    """
    facts = {}
    for name in names:
        if name in table.columns:  # the rollout's own, of each token
            continue
        rows = [prompt.columns for prompt in table.objects["prompt"]]
        values = [row.get(name) for row in rows]
        logged = [key.removeprefix(EXTRA) for key in table.objects if key.startswith(EXTRA)]
        known = [*dict.fromkeys(key for row in rows for key in row), *logged]
        if all(value is None for value in values):
            if name not in logged:
                raise ValueError(
                    f"loss.columns names {name!r}, which is neither a column of the data nor logged by a "
                    f"reward with log_extra({name!r}, values): {choices(name, known)}"
                )
            values = [*table.objects[EXTRA + name]]
        numbers = []
        for index, value in zip([prompt.index for prompt in table.objects["prompt"]], values, strict=True):
            numbers.append(finite_number(value, f"row {index}, loss.columns: {name}", known))
        facts[LOSS_COLUMN + name] = torch.tensor(numbers)
    return table.with_facts(**facts)
