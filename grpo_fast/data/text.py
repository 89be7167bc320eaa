"""The text of sampled tokens, as rewards, samples and stop texts see it."""

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
    """Decode completions without the tokens that are no text: see `hidden_tokens`."""
    hidden = hidden_tokens(tokenizer, end_ids)
    shown = [[token for token in row if token not in hidden] for row in rows]
    return [str(text) for text in raw_texts(tokenizer, shown)]


def raw_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode completions with every token, in which stop texts are searched."""
    ids = [list(row) for row in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def hidden_tokens(tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int]) -> Mapping[int, str]:
    """Return the added tokens that are cut from a completion's text.

    These are `end_ids`, the tokenizer's named special tokens, such as its padding, and the special tokens
    that the chat template writes. Tags such as `<think>`, `</think>` and `[/THINK]` are text, also where one
    ends completions, and so is any other token, even where the tokenizer calls it special: models write
    their answers in them.
    """
    return _hidden_tokens(tokenizer, state_of(tokenizer), tuple(end_ids))


# Without the marks of sequences and turns that come in pairs.
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
