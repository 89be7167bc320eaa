"""What the built-in rewards share: checked options, and readers of their arguments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic.dataclasses import dataclass

from grpo_fast.config.lookup import choices

CompletionTexts = Sequence[Any]  # N texts, or N conversations: one message of the assistant, or an episode's
Scores = list[float | None]
# Patterns run on what the model writes: one that backtracks for ever cannot be interrupted.
Pattern = re.Pattern[str]

# A built-in reward is a dataclass: its fields are the options, checked when it is made; its call scores.
reward = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))


def texts(completions: CompletionTexts) -> list[str]:
    """The text of each completion; of an episode what the assistant said last, nothing where a tool did."""
    return [item if isinstance(item, str) else _said(item[-1]) for item in completions]


def _said(message: Mapping[str, Any]) -> str:
    return (message.get("content") or "") if message["role"] == "assistant" else ""


@reward
class AnswerReward:
    """Scores each completion by the answer of its row; None where there is none."""

    answer_column: str = "answer"

    def __call__(self, completions: CompletionTexts, **columns: Any) -> Scores:
        pairs = answer_pairs(completions, columns, self.answer_column)
        return [None if answer is None else self.score(text, answer) for text, answer in pairs]

    def score(self, text: str, answer: str) -> float | None:
        raise NotImplementedError


def answer_pairs(
    completions: CompletionTexts, columns: Mapping[str, Sequence[Any]], answer_column: str
) -> list[tuple[str, str | None]]:
    """Return each completion's text with the answer of its row, None where there is none."""
    answers = column(columns, answer_column, "answer_column")
    pairs = zip(texts(completions), answers, strict=True)
    return [(text, None if answer is None else str(answer)) for text, answer in pairs]


def column(columns: Mapping[str, Sequence[Any]], name: str, option: str) -> Sequence[Any]:
    """A column of the dataset; raises ValueError naming the option that asked for it."""
    if name not in columns:
        raise ValueError(f"there is no column {name!r} ({option}): {choices(name, columns)}")
    return columns[name]


def column_options(function: Any) -> dict[str, str]:
    """Option -> column, of a built-in reward that reads columns by name; nothing for other functions."""
    if not dataclasses.is_dataclass(function):
        return {}
    names = (field.name for field in dataclasses.fields(function) if field.name.endswith("_column"))
    return {name: getattr(function, name) for name in names}


def extract(text: str, pattern: Pattern | None) -> str | None:
    """What the pattern's group matches, the last time that it does; the whole text without a pattern."""
    if pattern is None:
        return text.strip()
    groups = [match[1] for match in pattern.finditer(text)]
    return groups[-1].strip() if groups and groups[-1] is not None else None


def _has_group(pattern: Pattern) -> Pattern:
    if pattern.groups != 1:
        raise ValueError(f"{pattern.pattern!r} needs exactly one group, around the answer: 'Answer: (.*)'")
    return pattern


GroupPattern = Annotated[Pattern, AfterValidator(_has_group)]
