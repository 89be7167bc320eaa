"""The text of sampled tokens, as rewards, samples and stop texts see it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

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
    that the chat template writes. Tags such as `<think>` and `</think>` are text, and so is any other token,
    even where the tokenizer calls it special: models write their answers in them.
    """
    return _hidden_tokens(tokenizer, str(getattr(tokenizer, "chat_template", None)), tuple(end_ids))


@lru_cache(maxsize=32)
def _hidden_tokens(
    tokenizer: PreTrainedTokenizerBase, template: str, end_ids: tuple[int, ...]
) -> Mapping[int, str]:
    added = tokenizer.added_tokens_decoder
    known = template.join(token.content for token in added.values())
    named = {*map(str, tokenizer.special_tokens_map.values())}

    def hides(text: str) -> bool:
        tag = re.fullmatch(r"<(/?)([^<>/|]+)>", text)
        is_tag = tag is not None and (tag[1] or f"</{tag[2]}>" in known)
        return text in named or (text in template and not is_tag)

    return {
        index: token.content
        for index, token in added.items()
        if index in end_ids or (token.special and hides(token.content))
    }
