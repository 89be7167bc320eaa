"""Regular expressions of the user's, with a limit of time: one that backtracks cannot hold up a run."""

from __future__ import annotations

import re

import regex

TEXT_LIMIT = 1.0  # seconds of the process's CPU time for one text
NO_QUANTIFIER = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL)


class Pattern:
    """A pattern of `re` that stops with TimeoutError on a text that takes longer than `limit` seconds.

    The package `regex` matches it. Where its syntax goes beyond that of `re`, the pattern keeps the meaning
    that `re` gives it: `{e}` is text, not a fuzzy match.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is no pattern of `re`."""
        try:
            re.compile(text)
            self._compiled = regex.compile(NO_QUANTIFIER.sub(lambda found: found[1] or r"\{", text))
        except (re.error, regex.error) as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from error
        self.text, self.groups = text, self._compiled.groups
        self.limit, self.warned = TEXT_LIMIT, False

    def fullmatch(self, text: str) -> bool:
        return self._compiled.fullmatch(text, timeout=self.limit, concurrent=True) is not None

    def last(self, text: str) -> str | None:
        """Return what the first group matches, the last time that the pattern does."""
        found = [*self._compiled.finditer(text, timeout=self.limit, concurrent=True)]
        return found[-1][1] if found else None
