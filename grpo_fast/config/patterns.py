"""Regular expressions of the user, with a time limit, so that backtracking cannot hang a run."""

from __future__ import annotations

import re

import regex

TEXT_LIMIT = 1.0  # seconds of the process's CPU time for one text
NO_QUANTIFIER = re.compile(r"(\\N\{[^}]*\}|\\.)|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL)


class Pattern:
    """A pattern of `re` that raises TimeoutError on a text that takes longer than `limit` seconds.

    The package `regex` matches it, with the syntax of `re`: `{e}` is text, not a fuzzy match.
    """

    def __init__(self, text: str) -> None:
        """Raise ValueError for an invalid pattern."""
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
        """Return the first group of the last match, or None."""
        found = [*self._compiled.finditer(text, timeout=self.limit, concurrent=True)]
        return found[-1][1] if found else None
