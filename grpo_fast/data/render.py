"""Render rows to prompts: what the rewards see, and the text that the model gets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.lookup import choices
from grpo_fast.config.section import short
from grpo_fast.data.images import placed, row_images
from grpo_fast.data.template import MARK, render, template_of, turn_ends, variables_of
from grpo_fast.data.text import hidden_tokens
from grpo_fast.data.types import Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
ROLES = ("assistant", "developer", "system", "tool", "user")
TEMPLATE_REMEDY = "set model.chat_template to a Jinja file, or use an instruction-tuned model's tokenizer"

Tools = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
NO_ROW: Mapping[str, Any] = MappingProxyType({})
_WARNED: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # warnings that were logged, per tokenizer


class Renderer:
    """Apply one dataset's settings to its rows.

    A conversation goes through the chat template. Text becomes a user turn if `config.chat` is true, or
    "auto" and the tokenizer has a template. Otherwise the model gets the text as it is, as in TRL.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None
    ) -> None:
        """Check the settings against each other and the tokenizer; raise ValueError where they contradict.

        `tools` returns the JSON schemas of a row's tools. With tools, a row's prompt may be empty: its
        environment may begin the conversation.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.tools = tools
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = config.chat if isinstance(config.chat, bool) else has_template
        self._no_chat = "dataset.chat = false" if has_template else "the tokenizer has no chat template"
        if tools is not None and not self.chat:
            raise ValueError(f"rollout.tools and rollout.environment need chat, but {self._no_chat}")
        if self.chat and not has_template:
            raise ValueError(f"dataset.chat = true, but {self._no_chat}: {TEMPLATE_REMEDY}")
        if not self.chat and (config.system_prompt is not None or config.examples):
            key = "examples" if config.system_prompt is None else "system_prompt"
            remedy = f"{TEMPLATE_REMEDY} with dataset.chat = auto, or use dataset.prompt_template"
            raise ValueError(f"dataset.{key} needs a conversation, but {self._no_chat}: {remedy}")
        options = config.chat_template_kwargs
        if options and not self.chat:
            raise ValueError(f"dataset.chat_template_kwargs goes to the chat template, but {self._no_chat}")
        known = variables_of(template_of(tokenizer)) if options else set()
        for name in options:
            if name not in known:
                problem = f"dataset.chat_template_kwargs.{name} is no variable of the chat template"
                raise ValueError(f"{problem}: {choices(name, known)}")

    def prompt_and_images(self, row: Mapping[str, Any]) -> tuple[str | list[Message], list[Any]]:
        """Return a row's prompt as the rewards see it, and its images, or raise ValueError.

        Text stays text unless the row has tools or images. A conversation gets the configured turns in front.
        """
        value, images = self._value(row), row_images(row)
        if isinstance(value, str):
            if not value.strip() and self.tools is None:
                raise ValueError("the prompt is empty")
            if not images:
                return (value if self.tools is None else self.turns(value)), []
            value = [{"role": "user", "content": value}]
        turns, images = placed(self._conversation(value), images)
        if images and self.tools is not None:
            raise ValueError("the row has images, which rollout.tools and rollout.environment do not take")
        if not self.chat:
            remedy = "set dataset.chat = auto" if self.config.chat is False else TEMPLATE_REMEDY
            raise ValueError(f"the prompt is a conversation, but {self._no_chat}: {remedy}")
        return self._with_config_turns(turns), images

    def text(
        self, prompt: str | list[Message], row: Mapping[str, Any] = NO_ROW, *, first: bool = False
    ) -> str:
        """Return a prompt's text for the tokenizer, with the tools of its row.

        With `first`, for the first prompt of a dataset, render within limits of time and size, and check
        what the template leaves out or writes twice. Raises ValueError if the template refuses the
        conversation, exceeds a limit, or leaves out configured text or the question.
        """
        if isinstance(prompt, str) and not self.chat:
            return prompt
        tools, turns = None if self.tools is None else self.tools(row), self.turns(prompt)
        text = self._apply_template(turns, tools=tools, bounded=first)
        if first:
            self._check_text(turns, text)
        return text

    def _warn(self, problem: str, kind: str, *rest: str) -> None:
        """Log a problem of the chat template once, although each generation renders a first prompt."""
        said = _WARNED.setdefault(self.tokenizer, set())
        if (key := (template_of(self.tokenizer), problem, kind)) not in said:
            said.add(key)
            logger.warning(problem, kind, *rest)

    def _check_text(self, turns: list[Message], text: str) -> None:
        """Raise ValueError, or log a warning, for text that the template leaves out or writes twice."""
        keys = ["dataset.system_prompt"] * (self.config.system_prompt is not None)
        if turns[0]["role"] == "system" and not keys:
            keys = [""]
        keys += ["dataset.examples"] * (2 * len(self.config.examples))
        parts = [
            (keys[place] if place < len(keys) else "", turn["role"], part)
            for place, turn in enumerate(turns)
            for part in _texts_of(turn)
        ]
        written = _squeezed(text)
        for key, role, part in parts:
            squeezed = _squeezed(part)
            if squeezed not in written and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
                leaves_out = "the chat template leaves out text of the role %s: %s"
                problem = leaves_out % (role, short(part, 200))
                remedy = "set model.chat_template to a Jinja file that shows it"
                if key:
                    raise ValueError(f"{key}: {problem}; {remedy}, or take the text out of {key}")
                if role == "user" and part == parts[-1][2]:
                    raise ValueError(f"{problem}; {remedy}")
                self._warn(f"{leaves_out}; {remedy} (of the first prompt)", role, short(part, 200))
            expected = sum(_squeezed(other).count(squeezed) for _, _, other in parts)
            if len(squeezed) >= 20 and written.count(squeezed) > expected:
                twice = (
                    "the chat template writes text of the role %s more than once: %s (of the first prompt)"
                )
                self._warn(twice, role, short(part, 200))
        self._check_marks(parts[-1][2].lstrip() if parts and turns[-1]["role"] == "user" else "")
        self._check_turns()

    def _check_marks(self, question: str) -> None:
        """Raise ValueError for a question that is rendered already; log one that has a turn's mark in it."""
        found = [mark for mark in self._marks() if mark in question]
        if any(map(question.startswith, found)):
            mark = max(filter(question.startswith, found), key=len)
            problem = f"the prompt begins with {mark!r} of the chat template: it is rendered already"
            raise ValueError(f"{problem}; set dataset.chat = false, or leave the marks out")
        if found:
            self._warn(
                "the prompt has %r, which the chat template writes itself around a message: the model reads "
                "it as the mark of a turn (of the first prompt)",
                found[0],
            )

    def _marks(self) -> list[str]:
        """Return what the template writes around a message: special tokens, the BOS token, `[INST]`."""
        template = template_of(self.tokenizer)
        begins = self.tokenizer.bos_token if "bos_token" in template else None
        marks = [*hidden_tokens(self.tokenizer, ()).values(), "[INST]", "[/INST]"]
        return [mark for mark in dict.fromkeys(marks) if mark in template or mark == begins]

    def _check_turns(self) -> None:
        """Log a template that does not begin the assistant's turn, or ends it without an end token."""
        question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        try:
            plain, asked = (
                self._apply_template([question], finished=not asks, bounded=True) for asks in (False, True)
            )
            answered = self._apply_template([question, reply], finished=True, bounded=True)
        except ValueError:
            return
        header, _, rest = answered.removeprefix(plain).partition(MARK)
        if plain == asked and answered.startswith(plain) and header.strip():
            self._warn(
                "the chat template writes %r before the assistant's reply, and not at the end of a prompt; "
                "set model.chat_template to a Jinja file that reads add_generation_prompt",
                header,
            )
        ends = {str(self.tokenizer.eos_token), *hidden_tokens(self.tokenizer, ()).values()}
        if rest.strip() and not turn_ends(self.tokenizer) and not any(end in rest for end in ends):
            self._warn(
                "the chat template ends the assistant's turn with %r, which is no token: completions may run "
                "to rollout.max_completion_length; set rollout.stop",
                rest,
            )

    def answer(self, prompt: str | list[Message], answer: str) -> str:
        """Return the text that follows the prompt when `answer` completes it, with the end of the turn.

        If the prompt ends with the beginning of a reply, `answer` is its rest. Raises ValueError if the
        template refuses the conversation, or changes the prompt once it is answered.
        """
        if isinstance(prompt, str) and not self.chat:
            return answer
        turns, asked = self.turns(prompt), self.text(prompt)
        if turns[-1]["role"] == "assistant":
            turns, answer = turns[:-1], turns[-1]["content"] + answer
        reply = {"role": "assistant", "content": answer}
        answered = self._apply_template([*turns, reply], finished=True)
        if not answered.startswith(asked):
            problem = "the chat template changes the prompt once it is answered"
            raise ValueError(f"{problem}; set model.chat_template to a Jinja file that keeps it")
        return answered[len(asked) :]

    def _value(self, row: Mapping[str, Any]) -> Any:
        column, template = self.config.prompt_column, self.config.prompt_template
        if template is None:
            if column not in row and self.tools is not None:
                return ""
            if column not in row:
                raise ValueError(f"dataset.prompt_column = {column!r} is no column: {choices(column, row)}")
            if row[column] is None:
                raise ValueError(f"the row has no {column!r}")
            return row[column]
        braces = "a literal brace is written twice: {{ }}"
        try:
            return _FORMATTER.vformat(template, (), row)
        except KeyError as error:
            known = choices(name := str(error.args[0]), row)
            raise ValueError(
                f"dataset.prompt_template names the column {name!r}: {known} ({braces})"
            ) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            problem = f"dataset.prompt_template = {template!r} is malformed ({error})"
            raise ValueError(f"{problem}; write columns as {{question}}; {braces}") from error

    def turns(self, prompt: str | list[Message]) -> list[Message]:
        if isinstance(prompt, str):
            return self._with_config_turns([{"role": "user", "content": prompt}])
        return prompt

    def _with_config_turns(self, turns: list[Message]) -> list[Message]:
        """Put the system prompt and the examples before the row's turns."""
        system: list[Message] = []
        if turns[0]["role"] == "system":
            if self.config.system_prompt is not None:
                raise ValueError("the row has a system message; remove it, or dataset.system_prompt")
            system, turns = turns[:1], turns[1:]
        elif self.config.system_prompt is not None:
            system = [{"role": "system", "content": self.config.system_prompt}]
        examples = [
            {"role": role, "content": content}
            for pair in self.config.examples
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        return system + examples + turns

    def _apply_template(
        self,
        turns: list[Message],
        *,
        finished: bool = False,
        tools: list[Any] | None = None,
        bounded: bool = False,
    ) -> str:
        # A conversation that ends with the assistant is continued, unless it is `finished`.
        begun = turns[-1]["role"] == "assistant" and not finished
        try:
            return render(
                self.tokenizer,
                turns,
                tools=tools,
                options=self.config.chat_template_kwargs,
                asks=not begun and not finished,
                begun=begun,
                bounded=bounded,
            )
        except Exception as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(f"the chat template refuses the roles {roles}: {error}") from error

    def _conversation(self, value: Any) -> list[Message]:
        if not isinstance(value, list):
            got = f"{type(value).__name__}: {short(value, 200)}"
            raise ValueError(f"the prompt must be text or a list of messages, got {got}")
        turns = []
        for message in value:
            # Arrow gives every message the keys of all.
            turn = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
            if turn.get("tool_calls"):
                turn |= {"content": turn.get("content", ""), "tool_calls": _without_nulls(turn["tool_calls"])}
            role = turn.get("role")
            if not isinstance(role, str) or not isinstance(turn.get("content"), str | list):
                raise ValueError(f"a message is {{role: text, content: text}}, got {short(message, 200)}")
            if isinstance(turn["content"], list):
                turn["content"] = [_part(part) for part in turn["content"]]
            # A template may know further roles.
            if role not in ROLES and repr(role) not in str(self.tokenizer.chat_template):
                raise ValueError(f"a message has the unknown role {role!r}: {choices(role, ROLES)}")
            turns.append(turn)
        if not turns or not all(text_of(turn["content"]).strip() for turn in turns if turn["role"] == "user"):
            raise ValueError(f"the prompt is empty, or has an empty message of the user: {short(value, 200)}")
        if turns[-1]["role"] == "system":
            raise ValueError("the conversation ends with a system message; nobody asks anything")
        return turns


class _Columns(Formatter):
    """Format a row's columns; refuse attributes, and widths that make an endless text."""

    def get_field(self, name: str, args: Any, row: Any) -> Any:
        if "." in re.sub(r"\[[^\]]*\]", "", name):
            raise ValueError(f"{{{name}}} reads an attribute")
        return super().get_field(name, args, row)

    def format_field(self, value: Any, spec: str) -> str:
        if re.search(r"\d{5}", spec):
            raise ValueError(f"the format {short(spec)} is wider than 9999")
        return str(super().format_field(value, spec))


_FORMATTER = _Columns()


def _texts_of(turn: Message) -> list[str]:
    content = turn.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return [part["text"] for part in parts if part.get("text", "").strip()]


def _without_nulls(value: Any) -> Any:
    """Remove the null arguments that Arrow adds to a call from other calls."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _squeezed(text: str) -> str:
    """Normalize spaces: templates strip messages."""
    return " ".join(text.split())


def _part(part: Any) -> dict[str, Any]:
    """Check a part of a message's content, and remove the null keys that Arrow adds from other parts."""
    found = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    if found.get("type") == "image" or (found.get("type") == "text" and isinstance(found.get("text"), str)):
        return found
    raise ValueError(f"a part is {{type: text, text: text}} or {{type: image}}, got {short(part, 200)}")
