"""Render chat templates, and find the tokens that end the assistant's turn."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from grpo_fast.data.bounded import run_bounded
from grpo_fast.data.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "c41f8e"  # a text that nobody writes by chance
_BOUNDED: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()  # calls of each tokenizer that have ended


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    asks: bool = True,
    begun: bool = False,
    bounded: bool = False,
) -> str:
    """Apply the chat template to a conversation; raise whatever the template raises.

    Args:
        tokenizer: has the template.
        turns: the messages.
        tools: JSON schemas.
        options: further variables of the template, `dataset.chat_template_kwargs`.
        asks: begin the assistant's turn at the end.
        begun: continue the last message.
        bounded: raise ValueError if the first such call exceeds a limit of time or size, since a template may
            loop without end.
    """

    def text() -> str:
        return str(
            tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools or ()) or None,
                tokenize=False,
                add_generation_prompt=asks,
                continue_final_message=begun,
                **(options or {}),
            )
        )

    roles = frozenset(turn["role"] for turn in turns)
    kind = (template_of(tokenizer), str(options), bool(tools), asks, begun, roles)
    ended = _BOUNDED.setdefault(tokenizer, set())
    if not bounded or kind in ended or not hasattr(os, "fork"):
        return text()
    rendered = run_bounded(text)
    ended.add(kind)
    return rendered


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja text, of all templates if the tokenizer has several."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def variables_of(template: str) -> set[str]:
    """Return the variables that a template can take from `dataset.chat_template_kwargs`."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    plain = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:  # rendering raises it, with its line
        return set()
    given = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    return {name for name in meta.find_undeclared_variables(parsed) - given if not name.endswith("_token")}


def state_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return a cache key: the tokenizer's template and added tokens, which users may change."""
    tokens = tokenizer.added_tokens_decoder, tokenizer.special_tokens_map
    return (template_of(tokenizer), *map(str, tokens))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the added tokens that the chat template writes, in sequence, to end the assistant's turn."""
    if not template_of(tokenizer):
        return ()
    after = ""
    for parts in (False, True):  # some templates read text, some a list of parts
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in (("user", "?"), ("assistant", MARK))
        ]
        with suppress(Exception):  # the first prompt's rendering raises it
            shown, _, rest = render(tokenizer, turns, asks=False, bounded=True).rpartition(MARK)
            if shown:
                after = rest.lstrip()
                break
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.content}
    ends = []
    while found := [content for content in added if after.startswith(content)]:
        end = max(found, key=len)
        ends.append(added[end])
        after = after[len(end) :]
    return tuple(ends)
