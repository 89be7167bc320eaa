"""A prompt as the rest of the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_fast.data.images import PromptImages

# {"role": "user" | "assistant" | "system" | "tool", "content": str}, and an assistant's "tool_calls". Beside
# images the content is a list of parts: {"type": "text", "text": str} or {"type": "image"}.
Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenised."""

    index: int  # the row it came from
    prompt: str | list[Message]  # as the rewards see it: text, or a conversation
    token_ids: tuple[int, ...]  # what the model is given
    columns: Mapping[str, Any]  # every other column of the row
    images: PromptImages | None = None
    begun: str = ""  # the opening tag at the end of what the model is given, such as "<think>"


def text_of(content: str | list[dict[str, Any]]) -> str:
    """A message's content as text, with `<image>` in the place of each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Who says what, for a person: thoughts and text, then calls as `name(argument=value)`, one a line."""
    turns = []
    for message in messages:
        parts = [message.get("reasoning_content"), text_of(message.get("content") or "")]
        for call in message.get("tool_calls") or ():
            name, given = call["function"]["name"], call["function"]["arguments"]
            if isinstance(given, Mapping):
                given = ", ".join(f"{key}={value!r}" for key, value in given.items())
            parts.append(f"{name}({given})")
        tool = message.get("name") if message["role"] == "tool" else None
        turns.append((f"tool {tool}" if tool else message["role"], "\n".join(map(str, filter(None, parts)))))
    return turns


def own_turns(turns: Sequence[Message], example_turns: int) -> Sequence[Message]:
    """A row's own turns: without the system message and the turns of the configuration's examples."""
    return turns[(turns[0]["role"] == "system") + example_turns :]


def own_text(prompt: Prompt, example_turns: int) -> str:
    """A prompt as text: its own turns, one a line, where it is a conversation."""
    if isinstance(prompt.prompt, str):
        return prompt.prompt
    return "\n".join(text_of(turn["content"]) for turn in own_turns(prompt.prompt, example_turns))
