"""Right or wrong by comparing text or numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field

from grpo_fast.rewards.builtins.options import (
    Completions,
    GroupPattern,
    Scores,
    column,
    extract,
    reward,
    texts,
)

# GSM8K's answers end in this and the number.
GSM8K_MARKER = "####"

MINUS = "\N{MINUS SIGN}"  # what typography, and some models, write

# A sign counts where it does not subtract, a comma where it parts thousands, an exponent where it is short.
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-+{MINUS}])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)


@reward
class ExactMatch:
    """1 where the completion is the answer, spaces around aside; 0 elsewhere; None without an answer."""

    answer_column: str = "answer"
    extract: GroupPattern | None = None  # the part of the completion that is compared; 0 where it is missing
    ignore_case: bool = False

    def __call__(self, completions: Completions, **columns: Any) -> Scores:
        answers = column(columns, self.answer_column, "answer_column")
        return [self._score(text, answer) for text, answer in zip(texts(completions), answers, strict=True)]

    def _score(self, text: str, answer: Any) -> float | None:
        if answer is None:
            return None
        given, expected = extract(text, self.extract), str(answer).strip()
        if given is not None and self.ignore_case:
            given, expected = given.casefold(), expected.casefold()
        return float(given == expected)


@reward
class NumericMatch:
    """1 where the completion's number is the answer's, 0 elsewhere, None where the answer has no number.

    The number is the last one, or the first after the last `marker`. In an answer that has `####`, as those
    of GSM8K have, it is the first after that.
    """

    answer_column: str = "answer"
    marker: str | None = None  # the completion must have it
    tolerance: Annotated[float, Field(ge=0)] = 0.0  # largest absolute difference

    def __call__(self, completions: Completions, **columns: Any) -> Scores:
        answers = column(columns, self.answer_column, "answer_column")
        return [self._score(text, answer) for text, answer in zip(texts(completions), answers, strict=True)]

    def _score(self, text: str, answer: Any) -> float | None:
        answer = "" if answer is None else str(answer)
        expected = number_in(answer, GSM8K_MARKER if GSM8K_MARKER in answer else None)
        if expected is None:
            return None
        given = number_in(text, self.marker)
        if given is None:
            return 0.0
        if self.tolerance:
            return float(abs(given - expected) <= Decimal(str(self.tolerance)))
        return float(given == expected)


def number_in(text: str, marker: str | None = None) -> Decimal | None:
    """The last number of the text, or the first after the last marker."""
    if marker is None:
        found = NUMBER.findall(text)
        return _decimal(found[-1]) if found else None
    _, present, tail = text.rpartition(marker)
    first = NUMBER.search(tail) if present else None
    return _decimal(first[0]) if first else None


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace(MINUS, "-"))
