"""The completions to score, and which parts of them a reward function asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_fast.data.names import choices
from grpo_fast.data.types import Message
from grpo_fast.rewards.types import RewardError, RewardFunction

Conversation = list[Message]
ANSWER_COLUMN = "answer"


@dataclass(frozen=True)
class Batch:
    """N completions with what they answer."""

    prompts: list[str | Conversation]
    completions: list[str | Conversation]  # a conversation's answer is one assistant message, as in TRL
    columns: dict[str, list[Any]]
    completion_ids: list[list[int]] | None

    def __len__(self) -> int:
        return len(self.completions)

    def one(self, index: int) -> Batch:
        """The batch of one sample."""
        part = slice(index, index + 1)
        ids = None if self.completion_ids is None else self.completion_ids[part]
        columns = {name: values[part] for name, values in self.columns.items()}
        return Batch(self.prompts[part], self.completions[part], columns, ids)

    def describe(self, index: int) -> str:
        """One sample, for an error message."""
        lines = [f"prompt: {_short(self.prompts[index])}", f"completion: {_short(self.completions[index])}"]
        lines += [f"{name}: {_short(values[index])}" for name, values in self.columns.items()]
        return f"sample {index}:\n  " + "\n  ".join(lines)


def make_batch(
    prompts: Sequence[str | Conversation],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    completion_ids: Sequence[Sequence[int]] | None,
) -> Batch:
    """Checks the lengths; raises ValueError naming what differs from the number of completions."""
    n = len(completions)
    parts: dict[str, Sequence[Any]] = {"prompts": prompts}
    parts |= {f"columns[{name!r}]": values for name, values in columns.items()}
    if completion_ids is not None:
        parts["completion_ids"] = completion_ids
    for name, values in parts.items():
        if len(values) != n:
            raise ValueError(f"{name} has {len(values)} entries for {n} completions; give one each")
    return Batch(
        prompts=list(prompts),
        completions=[
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ],
        columns={name: list(values) for name, values in columns.items()},
        completion_ids=None if completion_ids is None else [list(ids) for ids in completion_ids],
    )


def arguments(
    name: str, function: RewardFunction, options: Mapping[str, Any], batch: Batch
) -> dict[str, Any]:
    """The keyword arguments of one call: what the signature asks for, everything where it takes `**columns`.

    A parameter `labels` that no column provides is the answer column, and `context` the dict of all columns.
    Options win over columns of their name.

    Raises:
        RewardError: a parameter without default that nothing provides.
    """
    offered: dict[str, Any] = {**batch.columns, "prompts": batch.prompts, "completions": batch.completions}
    if batch.completion_ids is not None:
        offered["completion_ids"] = batch.completion_ids
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        chosen = dict(offered)
    else:
        chosen = {p.name: offered[p.name] for p in parameters if p.name in offered}
    for parameter in parameters:
        asked = parameter.name
        if (
            asked in offered
            or asked in options
            or parameter.kind
            in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
        ):
            continue
        if asked == "context":
            chosen[asked] = batch.columns
        elif asked == "labels" and ANSWER_COLUMN in batch.columns:
            chosen[asked] = batch.columns[ANSWER_COLUMN]
        elif parameter.default is parameter.empty:
            raise RewardError(
                name,
                f"asks for {asked!r}, which is no column of the dataset: {choices(asked, batch.columns)}. "
                "Rename a column (dataset.rename) or give the value in the reward's options",
            )
    return {key: value for key, value in chosen.items() if key not in options} | dict(options)


def _short(value: Any, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
