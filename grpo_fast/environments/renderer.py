"""The renderers library's view of any chat template: turns stay as they were sampled, calls are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from renderers import BaseRendererConfig, DefaultRenderer, ParsedResponse, RenderedTokens
from renderers.base import ParsedToolCall

from grpo_fast.environments.template import TurnTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnRendererConfig(BaseRendererConfig):
    """For `TurnRenderer`, as that library's `custom` renderer."""

    name: Literal["custom"] = "custom"
    end_ids: tuple[int, ...]
    _internal_fields = frozenset({"end_ids"})


class TurnRenderer(DefaultRenderer):
    """The library's default, which renders what the tokenizer's chat template writes; beyond that, it goes on
    after a turn without writing it anew, and reads the calls of a template for tools."""

    config_class = TurnRendererConfig
    supports_tools = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TurnRendererConfig) -> None:
        super().__init__(tokenizer)
        self._end_ids = config.end_ids
        self._templates: dict[str, TurnTemplate] = {}  # by the tools that they show

    def get_stop_token_ids(self) -> list[int]:
        return list(self._end_ids)

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        if not tools:
            parsed = super().parse_response(token_ids, prompt_ids=prompt_ids)
            # What is no text does not come back in the next request, which must be known as what followed.
            return replace(parsed, reasoning_content=parsed.reasoning_content or None)
        message = self._template(tools).parse(token_ids)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return ParsedResponse(
            content=message["content"],
            reasoning_content=message.get("reasoning_content") or None,
            tool_calls=[ParsedToolCall(json.dumps(call), call["name"], call["arguments"]) for call in calls],
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> RenderedTokens | None:
        """All ids so far, and what the template writes from there to the model's next turn."""
        ids = [*previous_prompt_ids, *previous_completion_ids]
        try:
            messages = [dict(message) for message in new_messages]
            new = self._template(tools).after(messages, cut_off=ids[-1] not in self._end_ids)
        except ValueError:
            return None
        return RenderedTokens(
            token_ids=[*ids, *new],
            message_indices=[-1] * len(ids) + [len(new_messages) - 1] * len(new),
            message_roles=[message["role"] for message in new_messages],
        )

    def _template(self, tools: list[dict[str, Any]] | None) -> TurnTemplate:
        key = json.dumps(tools)
        if key not in self._templates:
            self._templates[key] = TurnTemplate(self._tokenizer, self._end_ids, tools or ())
        return self._templates[key]
