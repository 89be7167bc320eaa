"""Check the columns that a custom loss reads, and add them to a step's completions."""

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

EXTRA = "extra/"  # prefix of columns that rewards logged
LOSS_COLUMN = "column/"  # prefix of `loss.columns` as facts


def check_loss_columns(dataset: PromptDataset, names: Iterable[str], key: str = "loss.columns") -> None:
    """Raise ValueError for a column with a reserved name, or with a row that has no number.

    A column of `loss.columns` that no row has must come from a reward; `with_loss_columns` looks for it.
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
    """Return a column's value, or raise ValueError where it is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        name = what.rpartition(" ")[2]
        raise ValueError(
            f"{what} = {short(value)} is not a finite number; give one in each row, or name another column: "
            f"{choices(name, known)}"
        )
    return float(value)


def with_loss_columns(table: CompletionTable, names: Iterable[str]) -> CompletionTable:
    """Add the facts (S,) that `loss.columns` names, from each completion's prompt or a reward's log."""
    facts = {}
    prompts = table.objects["prompt"]
    logged = [key.removeprefix(EXTRA) for key in table.objects if key.startswith(EXTRA)]
    known = [*dict.fromkeys(key for prompt in prompts for key in prompt.columns), *logged]
    for name in (name for name in names if name not in table.columns):  # the rollout has those per token
        values = [prompt.columns.get(name) for prompt in prompts]
        if all(value is None for value in values):
            if name not in logged:
                raise ValueError(
                    f"loss.columns names {name!r}, which is neither a column of the data nor logged by a "
                    f"reward with log_extra({name!r}, values): {choices(name, known)}"
                )
            values = [*table.objects[EXTRA + name]]
        numbers = [
            finite_number(value, f"row {prompt.index}, loss.columns: {name}", known)
            for prompt, value in zip(prompts, values, strict=True)
        ]
        facts[LOSS_COLUMN + name] = torch.tensor(numbers)
    return table.with_facts(**facts)
