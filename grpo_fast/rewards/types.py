"""Define the arguments and the results of reward functions."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_fast.config.lookup import choices
from grpo_fast.config.section import short
from grpo_fast.data.types import Message, Prompt
from grpo_fast.rollout.types import Completion, as_asked

# As in TRL: f(prompts, completions, completion_ids, environments, trainer_state, log_metric, log_extra,
# **columns) -> one number or None per completion. A function gets the arguments that it names. It may be
# async.
RewardFunction = Callable[..., Any]
ANSWER_COLUMN = "answer"
ENVIRONMENTS = "environments"


class RewardError(RuntimeError):
    """A failed reward function: `reward` is its name, `sample` the completion's index, if known."""

    def __init__(self, reward: str, problem: str, sample: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {problem}")
        self.reward = reward
        self.sample = sample


@dataclass
class Log:
    """Metrics, and columns with a value per completion, that a function logs in one call, as in TRL."""

    size: int  # completions
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}) has {value}: log a finite number")
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.size:
            counts = f"has {len(values)} values for {self.size} completions"
            raise ValueError(f"log_extra({column!r}) {counts}; give one each")
        self.extra[column] = [_plain(value) for value in values]

    def add(self, other: Log) -> None:
        """Append the same function's log of further completions."""
        for name, numbers in other.metrics.items():
            self.metrics.setdefault(name, []).extend(numbers)
        for column in {**self.extra, **other.extra}:
            before = self.extra.get(column, [None] * self.size)
            self.extra[column] = before + other.extra.get(column, [None] * other.size)
        self.size += other.size


Scored = tuple[list[float], Log]  # one function's value per completion, and its log


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy's and torch's numbers to numbers, other objects to text."""
    value = value.item() if hasattr(value, "item") else value
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


@dataclass(frozen=True)
class RewardBatch:
    """N completions as arguments of reward functions, each a list of N."""

    prompts: list[str | list[Message]]
    completions: list[str | list[Message]]  # text, the reply to a conversation, or an episode's messages
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    begun: list[str]  # the tag that the prompt opens, and which the completion therefore lacks

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], columns: Sequence[str]
    ) -> RewardBatch:
        """Make a batch, group after group; a prompt without a column gets None.

        The instances of the environments are the column `environments`.
        """
        pairs = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
        values = {name: [prompt.columns.get(name) for prompt, _ in pairs] for name in columns}
        environments = [completion.episode and completion.episode.environment for _, completion in pairs]
        if any(environment is not None for environment in environments):
            values[ENVIRONMENTS] = environments
        return cls(
            [as_asked(prompt, completion).prompt for prompt, completion in pairs],
            [_answer(prompt, completion) for prompt, completion in pairs],
            [list(completion.token_ids) for _, completion in pairs],
            values,
            ["" if completion.episode else prompt.begun for prompt, completion in pairs],
        )

    def __len__(self) -> int:
        return len(self.completions)

    def describe(self, index: int) -> str:
        fields = {"prompt": self.prompts, "completion": self.completions, **self.columns}
        lines = [f"\n  {name}: {short(values[index], limit=300)}" for name, values in fields.items()]
        return f"sample {index}:{''.join(lines)}"

    def arguments(
        self, name: str, function: RewardFunction, options: Mapping[str, Any], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments that a function's signature asks for; all for `**columns`.

        As in Axolotl, `labels` is the answer column and `context` the dict of all columns. `begun` is the tag
        that each prompt ends with, such as `<think>`. Options override columns. Lists, dicts and arrays are
        copied, so that a function cannot change the arguments of the next. Raises RewardError for a parameter
        without a default that nothing provides.
        """
        everything: dict[str, Any] = {
            **self.columns,
            "prompts": self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
            **extras,
        }
        further = {"context": self.columns, "labels": self.columns.get(ANSWER_COLUMN), "begun": self.begun}
        offered = {key: value for key, value in further.items() if value is not None} | everything
        chosen: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            asked = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                chosen |= everything
            elif asked in offered:
                chosen[asked] = offered[asked]
            elif (
                asked not in options
                and parameter.default is parameter.empty
                and parameter.kind is not parameter.VAR_POSITIONAL
            ):
                remedy = "Rename a column (dataset.rename) or set the value in the reward's options"
                if asked == ENVIRONMENTS:
                    remedy = "The run has none: set rollout.environment"
                problem = f"asks for {asked!r}, which is no column of the dataset"
                raise RewardError(name, f"{problem}: {choices(asked, self.columns)}. {remedy}")
        return {key: _copied(value) for key, value in {**chosen, **options}.items()}


@dataclass(frozen=True)
class RewardResult:
    """Scores of N completions by F reward functions, on the CPU."""

    table: Tensor  # (N, F) float32, unweighted, NaN where a function does not apply
    total: Tensor  # (N,) float32, sum of weight × value over functions that apply, NaN where none does
    log: Log
    skipped: Mapping[str, str]  # error by function that failed with `on_error: skip`


def _copied(value: Any) -> Any:
    """Copy containers and arrays at any depth, but no other objects, such as environments."""
    if isinstance(value, (list, dict)):
        own = copy.copy(value)  # of the same class
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            own[key] = _copied(item)
        return own
    if type(value) is tuple:
        return tuple(map(_copied, value))
    return copy.deepcopy(value) if isinstance(value, (set, bytearray, np.ndarray, Tensor)) else value


def _answer(prompt: Prompt, completion: Completion) -> str | list[Message]:
    if completion.episode is not None:
        return list(completion.episode.messages)
    if isinstance(prompt.prompt, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]


def column_names(prompts: Sequence[Prompt]) -> list[str]:
    return list({name: None for prompt in prompts for name in prompt.columns})


def weighted_sum(table: Tensor, weights: Sequence[float]) -> Tensor:
    """Sum weight × value over the functions that apply: (..., F) to (...) float32, NaN where none does."""
    # In float64, so that equal sums do not differ by rounding.
    total = (table.double() * torch.tensor(weights, dtype=torch.float64, device=table.device)).nansum(-1)
    return total.where(table.isfinite().any(-1), torch.nan).float()
