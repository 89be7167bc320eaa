"""A row becomes a prompt: what the rewards see, and the text that the model is given."""

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
_SAID: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # of each tokenizer's template


class Renderer:
    """Applies one dataset's settings to its rows.

    A conversation goes through the chat template. Text becomes a user turn of it when `config.chat` is true,
    or "auto" and the tokenizer has a template; otherwise the model gets it as it is, as in TRL.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None
    ) -> None:
        """
        Args:
            tools: JSON schemas of what the model may call, for a row; an environment may then begin a prompt
                that the row leaves empty.

        Raises:
            ValueError: the settings contradict each other or the tokenizer.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.tools = tools
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = config.chat if isinstance(config.chat, bool) else has_template
        self._no_chat = "dataset.chat = false" if has_template else "the tokenizer has no chat template"
        if tools is not None and not self.chat:
            raise ValueError(
                f"rollout.tools and rollout.environment need a conversation, but {self._no_chat}"
            )
        if self.chat and not has_template:
            raise ValueError(f"dataset.chat = true, but {self._no_chat}: {TEMPLATE_REMEDY}")
        if not self.chat and (config.system_prompt is not None or config.examples):
            key = "examples" if config.system_prompt is None else "system_prompt"
            raise ValueError(
                f"dataset.{key} makes turns of a conversation, but {self._no_chat}: {TEMPLATE_REMEDY} with "
                "dataset.chat = auto, or write the text into dataset.prompt_template"
            )
        options = config.chat_template_kwargs
        if options and not self.chat:
            raise ValueError(f"dataset.chat_template_kwargs goes to the chat template, but {self._no_chat}")
        known = variables_of(template_of(tokenizer)) if options else {*options}
        for name in options:
            if name not in known:
                raise ValueError(
                    f"dataset.chat_template_kwargs.{name} is no variable of the chat template: "
                    f"{choices(name, known)}"
                )

    def prompt_and_images(self, row: Mapping[str, Any]) -> tuple[str | list[Message], list[Any]]:
        """A row as the rewards see it, and its images: text as it is, a conversation after the configured
        turns; where there are tools or images, always a conversation.

        Raises:
            ValueError: it makes no prompt; the message says what is wrong with it.
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
        """What the tokenizer is given of a prompt, of which the row says what tools it has.

        Args:
            first: of its dataset: the template is tried within limits, and what it loses or repeats is said.

        Raises:
            ValueError: the template refuses the conversation, or loses what the configuration says.
        """
        if isinstance(prompt, str) and not self.chat:
            return prompt
        tools, turns = None if self.tools is None else self.tools(row), self.turns(prompt)
        text = self._apply_template(turns, tools=tools, tries=first)
        if first:
            self._check_text(turns, text, tools)
        return text

    def _warn(self, problem: str, kind: str, *rest: str) -> None:
        """Log a problem of the chat template, once of a kind; generation renders a first prompt each time."""
        said = _SAID.setdefault(self.tokenizer, set())
        if (key := (template_of(self.tokenizer), problem, kind)) not in said:
            said.add(key)
            logger.warning(problem, kind, *rest)

    def _check_text(self, turns: list[Message], text: str, tools: list[dict[str, Any]] | None) -> None:
        """Raise ValueError, or log, what the template does to a conversation that nobody asked for."""
        keys = ["dataset.system_prompt"] * (self.config.system_prompt is not None)
        if turns[0]["role"] == "system" and not keys:
            keys = [""]
        keys += ["dataset.examples"] * (2 * len(self.config.examples))
        parts = [
            (keys[place] if place < len(keys) else "", turn["role"], said)
            for place, turn in enumerate(turns)
            for said in _texts_of(turn)
        ]
        written = _squeezed(text)
        for key, role, said in parts:
            squeezed = _squeezed(said)
            if squeezed not in written and json.dumps(said, ensure_ascii=False)[1:-1] not in text:
                leaves_out = "the chat template leaves out text of the role %s: %s"
                problem = leaves_out % (role, short(said, 200))
                remedy = "set model.chat_template to a Jinja file that shows it"
                if key:
                    raise ValueError(f"{key}: {problem}; {remedy}, or take the text out of {key}")
                if role == "user" and said == parts[-1][2]:
                    raise ValueError(f"{problem}; {remedy}")
                self._warn(f"{leaves_out}; {remedy} (of the first prompt)", role, short(said, 200))
            expected = sum(_squeezed(other).count(squeezed) for _, _, other in parts)
            if len(squeezed) >= 20 and written.count(squeezed) > expected:
                # What the template, or a tool, says without the conversation counts for neither.
                other = self._apply_template([_replaced(turn, said) for turn in turns], tools=tools)
                if written.count(squeezed) - _squeezed(other).count(squeezed) > expected:
                    twice = "the chat template writes text of the role %s more than once: %s"
                    self._warn(f"{twice} (of the first prompt)", role, short(said, 200))
        own = parts[-1][2].lstrip() if parts else ""
        found = [mark for mark in self._marks() if mark in own] if turns[-1]["role"] == "user" else []
        if any(map(own.startswith, found)):
            raise ValueError(
                f"the prompt begins with {max(filter(own.startswith, found), key=len)!r}, which the chat "
                "template writes itself: it is rendered already; set dataset.chat = false, or give the text "
                "alone"
            )
        if found:
            self._warn(
                "the prompt has %r, which the chat template writes itself around a message: the model reads "
                "a turn's mark in the question (of the first prompt)",
                found[0],
            )
        self._check_turns()

    def _marks(self) -> list[str]:
        """What the template writes around a message: special tokens, a text's first token, `[INST]`."""
        template = template_of(self.tokenizer)
        begins = self.tokenizer.bos_token if "bos_token" in template else None
        marks = [*hidden_tokens(self.tokenizer, ()).values(), "[INST]", "[/INST]"]
        return [mark for mark in dict.fromkeys(marks) if mark in template or mark == begins]

    def _check_turns(self) -> None:
        """Log that the template does not begin the assistant's turn, or ends it with no token."""
        question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
        try:
            plain, asked = (
                self._apply_template([question], finished=not asks, tries=True) for asks in (False, True)
            )
            answered = self._apply_template([question, reply], finished=True, tries=True)
        except ValueError:
            return
        header, _, rest = answered.removeprefix(plain).partition(MARK)
        if plain == asked and answered.startswith(plain) and header.strip():
            self._warn(
                "the chat template writes %r before the assistant's reply, and not at the end of a prompt, "
                "so that nothing begins the assistant's turn; set model.chat_template to a Jinja file that "
                "reads add_generation_prompt",
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
        """What follows the prompt's text when `answer` completes it, to the end of the turn.

        Args:
            prompt: as `prompt_and_images` returns it.
            answer: the assistant's reply; to a prompt that is a reply already begun, the rest of it.

        Raises:
            ValueError: the template refuses the conversation, or writes the prompt otherwise once answered.
        """
        if isinstance(prompt, str) and not self.chat:
            return answer
        turns, asked = self.turns(prompt), self.text(prompt)
        if turns[-1]["role"] == "assistant":
            turns, answer = turns[:-1], turns[-1]["content"] + answer
        reply = {"role": "assistant", "content": answer}
        answered = self._apply_template([*turns, reply], finished=True)
        if not answered.startswith(asked):
            raise ValueError(
                "the chat template writes the prompt otherwise once answered, so that no completion can be "
                "cut off it; set model.chat_template to a Jinja file that does not"
            )
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
            name = str(error.args[0])
            raise ValueError(
                f"dataset.prompt_template names the column {name!r}: {choices(name, row)} ({braces})"
            ) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(
                f"dataset.prompt_template = {template!r} is malformed ({error}); a field holds a column's "
                f"name, as {{question}}; {braces}"
            ) from error

    def turns(self, prompt: str | list[Message]) -> list[Message]:
        """A prompt as a conversation."""
        if isinstance(prompt, str):
            return self._with_config_turns([{"role": "user", "content": prompt}])
        return prompt

    def _with_config_turns(self, turns: list[Message]) -> list[Message]:
        """System prompt and examples go before the row's own turns."""
        system: list[Message] = []
        if turns[0]["role"] == "system":
            if self.config.system_prompt is not None:
                raise ValueError(
                    "the row has a system message of its own; remove it, or dataset.system_prompt"
                )
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
        tries: bool = False,
    ) -> str:
        # A conversation that ends with the assistant is a completion already begun, unless it is `finished`.
        begun = turns[-1]["role"] == "assistant" and not finished
        how: Any = {"asks": not begun and not finished, "begun": begun, "tries": tries}
        try:
            return render(self.tokenizer, turns, tools=tools, options=self.config.chat_template_kwargs, **how)
        except Exception as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ValueError(f"the chat template refuses the roles {roles}: {error}") from error

    def _conversation(self, value: Any) -> list[Message]:
        if not isinstance(value, list):
            kind = type(value).__name__
            raise ValueError(
                f"the prompt must be text or a list of messages, got {kind}: {short(value, 200)}"
            )
        turns = []
        for message in value:
            # Arrow gives every message every key that any of them has.
            turn = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
            if turn.get("tool_calls"):
                turn |= {"content": turn.get("content", ""), "tool_calls": _without_nulls(turn["tool_calls"])}
            role = turn.get("role")
            if not isinstance(role, str) or not isinstance(turn.get("content"), str | list):
                raise ValueError(f"a message is {{role: text, content: text}}, got {short(message, 200)}")
            if isinstance(turn["content"], list):
                turn["content"] = [_part(part) for part in turn["content"]]
            # Further roles are those that the template compares with.
            if role not in ROLES and repr(role) not in str(self.tokenizer.chat_template):
                raise ValueError(f"a message has the unknown role {role!r}: {choices(role, ROLES)}")
            turns.append(turn)
        if not turns or not all(text_of(turn["content"]).strip() for turn in turns if turn["role"] == "user"):
            raise ValueError(f"the prompt is empty, or has an empty message of the user: {short(value, 200)}")
        if turns[-1]["role"] == "system":
            raise ValueError("the conversation ends with a system message; nobody asks anything")
        return turns


class _Columns(Formatter):
    """Format a row's columns. Fields reach no attributes, and no width makes a text without end."""

    def get_field(self, name: str, args: Any, row: Any) -> Any:
        if "." in re.sub(r"\[[^\]]*\]", "", name):
            raise ValueError(f"{{{name}}} reaches an attribute")
        return super().get_field(name, args, row)

    def format_field(self, value: Any, spec: str) -> str:
        if re.search(r"\d{5}", spec):
            raise ValueError(f"the format {short(spec)} is wider than 9999")
        return str(super().format_field(value, spec))


_FORMATTER = _Columns()


def _texts_of(turn: Message) -> list[str]:
    """The texts of a message, without what stands for images."""
    content = turn.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return [part["text"] for part in parts if part.get("text", "").strip()]


def _replaced(turn: Message, text: str) -> Message:
    """A message with a mark in the place of a text."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return {**turn, "content": content.replace(text, MARK)}
    parts = [
        {**part, "text": part["text"].replace(text, MARK)} if "text" in part else part for part in content
    ]
    return {**turn, "content": parts}


def _without_nulls(value: Any) -> Any:
    """A message's calls without the arguments that Arrow has added from other calls."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _squeezed(text: str) -> str:
    """A text whose spaces do not count: templates strip messages."""
    return " ".join(text.split())


def _part(part: Any) -> dict[str, Any]:
    """A part of a message's content, without the keys that Arrow has added from others."""
    found = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    if found.get("type") == "image" or (found.get("type") == "text" and isinstance(found.get("text"), str)):
        return found
    raise ValueError(f"a part is {{type: text, text: text}} or {{type: image}}, got {short(part, 200)}")
