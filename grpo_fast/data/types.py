"""A prompt as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]  # {"role": "user" | "assistant" | "system", "content": str}


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenised."""

    index: int  # the row it came from
    prompt: str | list[Message]  # as the rewards see it: text, or a conversation
    token_ids: tuple[int, ...]  # what the model is given
    columns: Mapping[str, Any]  # every other column of the row
