"""Score answers, format and length of completions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field, model_validator

from grpo_fast.config.section import PositiveInt
from grpo_fast.rewards.builtins.options import (
    AnswerReward,
    AnyPattern,
    CompletionTexts,
    GroupPattern,
    LogMetric,
    Scores,
    extract,
    match_each,
    reward,
    texts,
)

GSM8K_MARKER = "####"  # before the number at the end of GSM8K's answers
MINUS = "\N{MINUS SIGN}"  # some models write it for "-"

# A sign that does not subtract, commas between thousands, and a short exponent belong to the number.
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-+{MINUS}])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)


@reward
class ExactMatch(AnswerReward):
    """1 if the completion, stripped, is the answer, else 0; None without an answer."""

    extract: GroupPattern | None = None  # the part of the completion to compare; 0 without a match
    ignore_case: bool = False

    def given(self, text: str) -> str | None:
        found = extract(text, self.extract)
        return found.casefold() if found is not None and self.ignore_case else found

    def score(self, given: str | None, answer: str) -> float:
        expected = answer.strip()
        return float(given == (expected.casefold() if self.ignore_case else expected))


@reward
class NumericMatch(AnswerReward):
    """1 if the completion's number is the answer's, else 0; None if the answer has no number.

    It is the last number, or the first after the last `marker`. In an answer with `####`, as in GSM8K, it is
    the first after that.
    """

    marker: str | None = None  # the completion must have it
    tolerance: Annotated[float, Field(ge=0)] = 0.0  # largest absolute difference

    def given(self, text: str) -> Decimal | None:
        return number_in(text, self.marker)

    def score(self, given: Decimal | None, answer: str) -> float | None:
        expected = number_in(answer, GSM8K_MARKER if GSM8K_MARKER in answer else None)
        if expected is None:
            return None
        return float(given is not None and abs(given - expected) <= Decimal(str(self.tolerance)))


def number_in(text: str, marker: str | None = None) -> Decimal | None:
    """Return the last number of the text, or the first after the last marker."""
    if marker is None:
        found = NUMBER.findall(text)
        return _decimal(found[-1]) if found else None
    _, present, tail = text.rpartition(marker)
    first = NUMBER.search(tail) if present else None
    return _decimal(first[0]) if first else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace(MINUS, "-"))


@reward
class TagReward:
    """Score the format of each completion, including the part that the prompt begins."""

    tags: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["think", "answer"])
    prefix: str | None = None  # what the prompt begins; null: the first tag, if the prompt ends with it

    def __call__(
        self, completions: CompletionTexts, begun: Sequence[str] | None = None, **columns: Any
    ) -> Scores:
        first = f"<{self.tags[0]}>"
        opened = [first if tag == first else "" for tag in begun or [""] * len(completions)]
        prefixes = opened if self.prefix is None else [self.prefix] * len(completions)
        return [self.score(prefix + text) for prefix, text in zip(prefixes, texts(completions), strict=True)]

    def score(self, text: str) -> float:
        raise NotImplementedError


@reward
class TagFormat(TagReward):
    """1 if the completion is exactly `<a>...</a> <b>...</b>`, with each tag once, in order; else 0."""

    def score(self, text: str) -> float:
        once = all(text.count(mark) == 1 for mark in marks(self.tags))
        blocks = [rf"<{tag}>(?!\s*</{tag}>).*</{tag}>" for tag in map(re.escape, self.tags)]
        return float(once and re.fullmatch(r"\s*".join(["", *blocks, ""]), text, re.DOTALL) is not None)


def marks(tags: Sequence[str]) -> list[str]:
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


@reward
class TagFormatIncremental(TagReward):
    """The share of opening and closing tags that occur exactly once."""

    def score(self, text: str) -> float:
        return [text.count(mark) for mark in marks(self.tags)].count(1) / (2 * len(self.tags))


@reward
class RegexFormat:
    """1 if the whole completion matches the pattern, else 0."""

    pattern: AnyPattern

    def __call__(
        self, completions: CompletionTexts, log_metric: LogMetric | None = None, **columns: Any
    ) -> Scores:
        return match_each(
            self.pattern, texts(completions), lambda text: float(self.pattern.fullmatch(text)), log_metric
        )


@reward
class Length:
    """−penalty × |tokens − target| / target."""

    target: PositiveInt
    penalty: Annotated[float, Field(gt=0)] = 1.0

    def __call__(
        self, completions: CompletionTexts, completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> Scores:
        return [-self.penalty * abs(n - self.target) / self.target for n in map(len, completion_ids)]


@reward
class SoftOverlong:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13).

    0 up to max_length − cache tokens, then decreasing to −1 at max_length, −1 beyond.
    """

    max_length: PositiveInt
    cache: PositiveInt

    @model_validator(mode="after")
    def _consistent(self) -> SoftOverlong:
        if self.cache > self.max_length:
            raise ValueError(f"cache = {self.cache} exceeds max_length = {self.max_length}; lower it")
        return self

    def __call__(
        self, completions: CompletionTexts, completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> Scores:
        free = self.max_length - self.cache
        return [max(-1.0, min(0.0, (free - n) / self.cache)) for n in map(len, completion_ids)]
