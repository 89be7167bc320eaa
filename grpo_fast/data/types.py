"""A prompt as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# {"role": "user" | "assistant" | "system" | "tool", "content": str}, and an assistant's "tool_calls".
Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenised."""

    index: int  # the row it came from
    prompt: str | list[Message]  # as the rewards see it: text, or a conversation
    token_ids: tuple[int, ...]  # what the model is given
    columns: Mapping[str, Any]  # every other column of the row


def own_turns(turns: Sequence[Message], example_turns: int) -> Sequence[Message]:
    """A row's own turns: without the system message and the turns of the configuration's examples."""
    return turns[(turns[0]["role"] == "system") + example_turns :]


def own_text(prompt: Prompt, example_turns: int) -> str:
    """A prompt as text: its own turns, one a line, where it is a conversation."""
    if isinstance(prompt.prompt, str):
        return prompt.prompt
    return "\n".join(turn["content"] for turn in own_turns(prompt.prompt, example_turns))
