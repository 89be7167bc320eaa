"""Tokenize the text between two turns of the model, and parse the tool calls of a turn.

Sampled tokens are kept. Only the text that the chat template writes between the end of the assistant's turn
and the beginning of its next one is tokenized.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data.template import MARK, render
from grpo_fast.data.text import completion_texts
from grpo_fast.data.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION: Message = {"role": "user", "content": "?"}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "arguments": {"key": MARK}}}
REMEDY = "set model.chat_template to a Jinja file of a template for tools, or use a model trained with them"

_JSON_CALL = {"transform": {"type": "function", "function": "{content}"}, "content": "json"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Formats of calls, for tokenizers without a `response_template`.
FORMATS: dict[str, dict[str, Any]] = {
    # Hermes, Qwen2.5, Qwen3, SmolLM3
    "JSON in <tool_call>": {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", **_JSON_CALL},
    # Qwen3-Coder, Qwen3.5
    "<function=name> in <tool_call>": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        "close_pattern": r"</function>\s*</tool_call>\s*",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>",
            "value_parser": {"name": "text"},
        },
        "transform": _NAMED_CALL,
    },
    # Llama 3.1 and later
    "JSON with parameters": {
        "open_pattern": r'(?:<\|python_tag\|>)?\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}\s*(?:;\s*|$)",
        "content": "json",
        "transform": _NAMED_CALL,
    },
}


class TurnTemplate:
    """The continuation of a turn by a tokenizer's chat template, which is tested if there are tools.

    `end_ids` are the tokens at which the engine ends a turn. Raises ValueError if the template does not show
    calls or results, does not end a turn with one of `end_ids`, cannot be tokenized in parts, or writes calls
    in an unknown format.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        schemas: Sequence[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._schemas: list[Any] = list(schemas)
        ends = {id: str(tokenizer.decode([id])) for id in end_ids}
        self._ends = {text: id for id, text in ends.items() if text}
        self.end_id = -1  # the token that ends a turn with calls
        self._format: dict[str, Any] | None = None  # of calls
        if schemas and "tools" not in inspect.signature(type(tokenizer).parse_response).parameters:
            raise ValueError("tools need transformers 5.15 or newer: pip install --upgrade transformers")
        try:
            if schemas:
                self._try_out()
        except ValueError as error:
            raise ValueError(f"tools need a chat template with tool calls: {error}; {REMEDY}") from error

    def after(self, messages: Sequence[Message], *, cut_off: bool = False) -> tuple[int, ...]:
        """Return the ids of messages after a turn, maybe `cut_off`, and of the next turn's beginning."""
        _, end, rest = self._going_on(messages)
        return tuple(self._ids(end + rest if cut_off else rest))

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Parse a turn as a message, with `tool_calls` if all are well-formed, else as text."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self._ends.values() else token_ids
        try:
            if self._format is not None:
                return self._read(str(self._tokenizer.decode(list(ids))), self._format, self._header)
        except ValueError:  # no calls, or malformed ones
            pass
        (text,) = completion_texts(self._tokenizer, [ids], tuple(self._ends.values()))
        return {"role": "assistant", "content": text}

    def _try_out(self) -> None:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has none")
        called, answer = CALL["function"], MARK[::-1]
        said, end, rest = self._going_on([{"role": "tool", "name": called["name"], "content": answer}])
        asked, begun = (self._render([QUESTION], more) for more in (False, True))
        if not begun.startswith(asked) or not said.startswith(asked):
            raise ValueError("it changes a question once it is answered")
        if called["name"] not in said or answer not in rest:
            raise ValueError("it does not show calls and their results")
        self.end_id = self._ends[end]
        ids, whole = self._ids(rest), self._ids(said + end + rest)
        if not ids or whole[-len(ids) :] != ids or whole[-len(ids) - 1] != self.end_id:
            raise ValueError("its tokens after a turn depend on those before")
        self._header = begun[len(asked) :]
        anchor = self._header.split("<think>")[0]  # some templates open the model's thoughts
        self._format = self._find_format(said[len(asked) :].removeprefix(anchor), anchor)

    def _going_on(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Render a conversation; return its text before the end of the model's turn, that end, and the rest.

        The turn has a call for each tool message. `MARK`, in their arguments or in its text, locates it.
        """
        answers, calls = list(messages), []
        for i, message in enumerate(messages):
            if message["role"] == "tool":
                name = str(message.get("name") or "tool")
                calls.append({**CALL, "id": f"{i:09d}", "function": {**CALL["function"], "name": name}})
                answers[i] = {**message, "tool_call_id": f"{i:09d}"}
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        turn = said if calls else {"role": "assistant", "content": MARK}
        text = self._render([QUESTION, turn, *answers], True)
        if text.count(MARK) < max(1, len(calls)):
            raise ValueError("it does not show the arguments of calls")
        after = text.rfind(MARK) + len(MARK)
        ends = [(at, mark) for mark in self._ends if (at := text.find(mark, after)) >= 0]
        if not ends:
            known = ", ".join(map(repr, self._ends))
            raise ValueError(f"it ends a turn with none of the tokens that end generation ({known})")
        at, mark = min(ends)
        return text[:at], mark, text[at + len(mark) :]

    def _render(self, turns: list[Message], more: bool) -> str:
        # A template may loop only on tools: the tests of it run within limits.
        tests = bool(self._schemas) and self._format is None
        options: Any = {"options": self._options, "asks": more, "bounded": tests}
        try:
            return render(self._tokenizer, turns, tools=self._schemas, **options)
        except Exception as error:  # whatever a template raises
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(f"it refuses the roles {roles} ({error})") from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _find_format(self, turn: str, anchor: str) -> dict[str, Any]:
        """Return the response template that parses the call in `turn`."""
        own = getattr(self._tokenizer, "response_template", None)
        thoughts = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
        known = [
            {
                "defaults": {"role": "assistant"},
                "start_anchor": anchor,
                "fields": {
                    "reasoning_content": thoughts,
                    "tool_calls": {**form, "repeats": True},
                    "content": {"content": "text"},
                },
            }
            for form in FORMATS.values()
        ]
        for template in [own] if own else known:
            try:
                calls = self._read(turn, template, anchor).get("tool_calls")
            except ValueError:
                continue
            if calls and calls[0]["function"] == CALL["function"]:
                return template
        formats = "its tokenizer's response_template" if own else ", ".join(FORMATS)
        raise ValueError(f"the format of its calls, such as {turn!r}, is none of: {formats}")

    def _read(self, text: str, form: dict[str, Any], prefix: str) -> Message:
        try:
            found = self._tokenizer.parse_response(text, form, prefix=prefix, tools=self._schemas)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error
        message: Message = {"role": "assistant", "content": "", **(found or {})}
        for call in message.get("tool_calls", ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError("a call without a name")
            function["arguments"] = function.get("arguments") or {}
            if not isinstance(function["arguments"], dict):
                raise ValueError("arguments are an object")
        return message
