"""Prompts prefilled once, then one token a row and step: what the transformers engine decodes with.

`ExpandedDecoder` repeats each prompt's cache for its completions and leaves attention to the model, so
it serves any causal model. `shared_prefix.py` has the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Prompt = Sequence[int]


class Decoder(Protocol):
    """R rows in flight, each continuing one of U prompts. V is the vocabulary."""

    attention: str  # the name, among transformers' attention implementations, of the one it needs

    @staticmethod
    def kv_tokens(prompts: int, longest: int, rows: int, max_new: int) -> int:
        """Tokens whose keys and values are held at once for `rows` completions of `prompts` prompts."""
        ...

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        """Read U prompts. `owners` (R,) int64, ascending, says whose completion a row is. (R, V) logits."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` (R,) int64. (R, V) logits of the next ones."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only: ascending indices, int64, into the present ones."""
        ...

    def memory(self) -> int:
        """Bytes of keys and values held."""
        ...


def left_pad(prompts: Sequence[Prompt], device: torch.device) -> tuple[Tensor, Tensor]:
    """(U, longest) int64 tokens, and the mask of the real ones; the last column is always real."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = torch.arange(longest) >= torch.tensor(pads)[:, None]
    return torch.tensor(ids, device=device), mask.to(device)


def last_position(ids: Tensor) -> Tensor:
    """The index of the last column, for `logits_to_keep`.

    A number would make the model slice its hidden states; the product with the head then repeats the whole
    head for every row (torch.matmul does not fold a strided batch). An index copies the rows instead.
    """
    return torch.tensor([ids.shape[1] - 1], device=ids.device)


class ExpandedDecoder:
    """The model's own attention over a `DynamicCache` with one entry a row."""

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        self.model = model
        self.attention = "sdpa" if model._supports_sdpa else "eager"
        self.cache = DynamicCache(config=model.config)

    @staticmethod
    def kv_tokens(prompts: int, longest: int, rows: int, max_new: int) -> int:
        return rows * (longest + max_new)

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        ids, self.mask = left_pad(prompts, self.model.device)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)  # a pad's position is never looked at
        logits = self._forward(ids, positions)
        self.positions = positions[:, -1:]
        if len(owners) > len(prompts):
            self.keep(owners)
        return logits[owners]

    def step(self, tokens: Tensor) -> Tensor:
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], self.positions)

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)  # the one selection that every kind of layer has
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def memory(self) -> int:
        tensors = [t for layer in self.cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in tensors)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=last_position(ids),
        ).logits[:, -1]
