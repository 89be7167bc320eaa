"""Decode sampled tokens to the text that rewards, logs and stop strings see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from grpo_fast.data.template import state_of, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], end_ids: Sequence[int]
) -> list[str]:
    """Decode completions without their `hidden_tokens`."""
    hidden = hidden_tokens(tokenizer, end_ids)
    shown = [[token for token in row if token not in hidden] for row in rows]
    return [str(text) for text in raw_texts(tokenizer, shown)]


def raw_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode completions with every token, to search for stop strings."""
    ids = [list(row) for row in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int]) -> Mapping[int, str]:
    """Return the added tokens that are removed from a completion's text.

    These are `end_ids`, the tokenizer's named special tokens, such as its padding, and the special tokens
    that the chat template writes. All other tokens are text, even if the tokenizer calls them special. So are
    tags such as `<think>` and `[/THINK]`, even if one ends completions: models write answers in them.
    """
    return _hidden_tokens(tokenizer, state_of(tokenizer), tuple(end_ids))


# Tags in pairs, without the marks of sequences and turns.
TAG = re.compile(r"[<\[](/?)(?!(?:s|INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)[>\]])[^<>\[\]/|]+[>\]]")


@lru_cache(maxsize=32)
def _hidden_tokens(
    tokenizer: PreTrainedTokenizerBase, state: tuple[str, ...], end_ids: tuple[int, ...]
) -> Mapping[int, str]:
    added, template = tokenizer.added_tokens_decoder, template_of(tokenizer)
    known = template.join(token.content for token in added.values())
    named = {*map(str, tokenizer.special_tokens_map.values())}

    def is_text(token: str) -> bool:
        tag = TAG.fullmatch(token)
        if tag is None or token in named:
            return False
        return token.replace("/", "", 1) not in named if tag[1] else f"{token[0]}/{token[1:]}" in known

    return {
        index: token.content
        for index, token in added.items()
        if (index in end_ids or token.content in named or (token.special and token.content in template))
        and not is_text(token.content)
    }
