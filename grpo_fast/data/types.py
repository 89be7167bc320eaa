"""Define prompts and messages, and convert them to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_fast.data.images import PromptImages

# {"role": "user" | "assistant" | "system" | "tool", "content": str}, and an assistant's "tool_calls". With
# images, the content is a list of parts: {"type": "text", "text": str} or {"type": "image"}.
Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenized."""

    index: int  # the row's number
    prompt: str | list[Message]  # as the rewards see it: text, or a conversation
    token_ids: tuple[int, ...]  # the model's input
    columns: Mapping[str, Any]  # every other column of the row
    images: PromptImages | None = None
    begun: str = ""  # the opening tag at the end of the model's input, such as "<think>"


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return a message's content as text, with `<image>` for each image."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return (speaker, text) of each message to display: thoughts, text, then calls as `name(key=value)`."""
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
    """Return a row's turns without the system message and the configured examples."""
    return turns[(turns[0]["role"] == "system") + example_turns :]


def own_text(prompt: Prompt, example_turns: int) -> str:
    """Return a prompt as text; of a conversation the row's turns, one per line."""
    if isinstance(prompt.prompt, str):
        return prompt.prompt
    return "\n".join(text_of(turn["content"]) for turn in own_turns(prompt.prompt, example_turns))
