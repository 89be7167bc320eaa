"""Whether a completion has the form that was asked for."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from grpo_fast.rewards.builtins.options import Completions, Pattern, Scores, reward, texts

Tags = Annotated[list[str], Field(min_length=1)]


@reward
class TagFormat:
    """1 where the completion is exactly `<a>...</a> <b>...</b>`: each tag once, in order, nothing around."""

    tags: Tags = Field(default_factory=lambda: ["think", "answer"])
    prefix: str = ""  # what the prompt has begun already, such as "<think>"

    def __call__(self, completions: Completions, **columns: Any) -> Scores:
        return [float(self._fits(self.prefix + text)) for text in texts(completions)]

    def _fits(self, text: str) -> bool:
        rest = text.strip()
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1 or not rest.startswith(opening):
                return False
            inside, closed, rest = rest.removeprefix(opening).partition(closing)
            if not closed or not inside.strip():
                return False
            rest = rest.lstrip()
        return not rest


@reward
class TagFormatIncremental:
    """The share of the opening and closing tags that occur exactly once: something to climb."""

    tags: Tags = Field(default_factory=lambda: ["think", "answer"])
    prefix: str = ""  # what the prompt has begun already

    def __call__(self, completions: Completions, **columns: Any) -> Scores:
        wanted = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        return [
            sum((self.prefix + text).count(mark) == 1 for mark in wanted) / len(wanted)
            for text in texts(completions)
        ]


@reward
class RegexFormat:
    """1 where the whole completion matches the pattern, 0 elsewhere."""

    pattern: Pattern

    def __call__(self, completions: Completions, **columns: Any) -> Scores:
        return [float(re.fullmatch(self.pattern, text) is not None) for text in texts(completions)]
