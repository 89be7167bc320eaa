"""Validate the options of built-in rewards, and read their arguments."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from time import perf_counter
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from grpo_fast.config.lookup import choices
from grpo_fast.config.patterns import TEXT_LIMIT, Pattern
from grpo_fast.config.section import short

CompletionTexts = Sequence[Any]  # N texts, or N conversations: a reply, or an episode's messages
Scores = list[float | None]
LogMetric = Callable[[str, float], None]
T = TypeVar("T")

CALL_LIMIT = 10.0  # seconds that texts beyond their limit may take in one call
SHORTEST = 0.01  # seconds for each further text of such a call

logger = logging.getLogger(__name__)


def match_each(
    pattern: Pattern | None, items: Iterable[T], score: Callable[[T], float | None], log: LogMetric | None
) -> Scores:
    """Score each item, 0 if the pattern takes too long, and log the share of these as `regex/timeouts`."""
    if pattern is None:
        return [*map(score, items)]
    scores: Scores = []
    late = 0
    spent, pattern.limit = 0.0, TEXT_LIMIT
    for item in items:
        start = perf_counter()
        try:
            scores.append(score(item))
        except TimeoutError:
            late, spent = late + 1, spent + perf_counter() - start
            scores.append(0.0)
            pattern.limit = TEXT_LIMIT if spent < CALL_LIMIT else SHORTEST
    if late and not pattern.warned:
        pattern.warned = True
        logger.warning(
            "the pattern %r took longer than %g s on %d of %d completions, which score 0: avoid nested "
            "repeats and alternatives that match the same text, such as (a|a)*",
            *(pattern.text, TEXT_LIMIT, late, len(scores)),
        )
    if log is not None and scores:
        log("regex/timeouts", late / len(scores))
    return scores


# A built-in reward is a dataclass, whose fields are its options.
reward = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))


def texts(completions: CompletionTexts) -> list[str]:
    """Return the text of each completion: of an episode its last message, if that is the assistant's."""
    return [item if isinstance(item, str) else _said(item[-1]) for item in completions]


def _said(message: Mapping[str, Any]) -> str:
    return (message.get("content") or "") if message["role"] == "assistant" else ""


@reward
class AnswerReward:
    """Score each completion by the best of its row's answers; None without an answer."""

    answer_column: str = "answer"

    def __call__(
        self, completions: CompletionTexts, log_metric: LogMetric | None = None, **columns: Any
    ) -> Scores:
        pairs = answer_pairs(completions, columns, self.answer_column)

        def best(pair: tuple[str, Sequence[str]]) -> float | None:
            text, answers = pair
            given = self.given(text) if answers else None
            scores = (self.score(given, answer) for answer in answers)
            return max((score for score in scores if score is not None), default=None)

        return match_each(getattr(self, "extract", None), pairs, best, log_metric)

    def given(self, text: str) -> Any:
        """Extract the part of a completion that `score` compares."""
        raise NotImplementedError

    def score(self, given: Any, answer: str) -> float | None:
        raise NotImplementedError


def answer_pairs(
    completions: CompletionTexts, columns: Mapping[str, Sequence[Any]], answer_column: str
) -> list[tuple[str, tuple[str, ...]]]:
    answers = column(columns, answer_column, "answer_column")
    return [(text, answers_of(answer)) for text, answer in zip(texts(completions), answers, strict=True)]


def answers_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a row's answer, each of which is right; none for None and NaN.

    A list holds alternatives. A whole number that a source stores as a float is right as `4` and as `4.0`.
    Raises ValueError for a dict, bytes, a list of lists, or an object of another type.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy, torch
    several = (list, tuple, set)
    if isinstance(value, several) and not any(isinstance(one, several) for one in value):
        return tuple(dict.fromkeys(text for one in value for text in answers_of(one)))
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return ()
    if isinstance(value, float | Decimal) and value != value:
        return ()
    if isinstance(value, float):
        return (str(int(value)), str(value)) if value.is_integer() else (str(value),)
    if isinstance(value, Decimal):
        text = f"{value:f}"
        return (text.rstrip("0").rstrip("."), text) if "." in text else (text,)
    if isinstance(value, bool):
        return str(value), str(value).lower()
    if isinstance(value, str | int | date | time):
        return (str(value),)
    problem = f"the answer {short(value)} is a {type(value).__name__}"
    raise ValueError(f"{problem}: give text, a number, or a list of alternatives")


def column(columns: Mapping[str, Sequence[Any]], name: str, option: str) -> Sequence[Any]:
    """Return a column of the dataset, or raise ValueError with the option that names it."""
    if name not in columns:
        raise ValueError(f"there is no column {name!r} ({option}): {choices(name, columns)}")
    return columns[name]


def column_options(function: Any) -> dict[str, str]:
    """Return the columns that a built-in reward reads, by option; nothing for other functions."""
    if not dataclasses.is_dataclass(function):
        return {}
    names = (field.name for field in dataclasses.fields(function) if field.name.endswith("_column"))
    return {name: getattr(function, name) for name in names}


def sought_texts(function: Any) -> list[str]:
    """Return the tags, markers and patterns of a built-in reward; nothing for other functions."""
    options = vars(function).items() if dataclasses.is_dataclass(function) else ()
    found = [value for name, value in options if value and not name.endswith("_column")]
    tags = [f"<{tag}></{tag}>" for value in found if isinstance(value, list) for tag in value]
    patterns = [re.sub(r"\\(.)", r"\1", value.text) for value in found if isinstance(value, Pattern)]
    return [*tags, *patterns, *(value for value in found if isinstance(value, str))]


def extract(text: str, pattern: Pattern | None) -> str | None:
    """Return the group of the pattern's last match, or the whole text without a pattern."""
    found = text if pattern is None else pattern.last(text)
    return None if found is None else found.strip()


def _pattern(value: Any) -> Any:
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        flags = "".join(flag for flag in "aimsx" if value.flags & re.RegexFlag[flag.upper()])
        value = f"(?{flags}){value.pattern}" if flags else value.pattern
    if not isinstance(value, str | Pattern):
        raise ValueError(f"{value!r} is no regular expression: write it as text")
    return Pattern(value) if isinstance(value, str) else value


def _has_group(pattern: Pattern) -> Pattern:
    if pattern.groups != 1:
        raise ValueError(f"{pattern.text!r} needs exactly one group, around the answer: 'Answer: (.*)'")
    return pattern


AnyPattern = Annotated[Pattern, BeforeValidator(_pattern)]
GroupPattern = Annotated[AnyPattern, AfterValidator(_has_group)]
