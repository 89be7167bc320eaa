"""Decode models whose cache has only keys and values, with one prefill per prompt.

The cache of a prompt is copied for each of its completions, and finished rows leave the batch. transformers'
`generate`, which `generate.py` uses for all other models, does neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_fast.rollout.batch import Batch

DROP_BELOW = 0.9  # finished rows leave the batch when its unfinished share is below this
WORTH_SHARING = 16  # tokens; a shorter common prefix is not worth its own forward
_ARGUMENTS = {"attention_mask", "position_ids", "logits_to_keep"}


def reads_prompts_once(model: PreTrainedModel) -> bool:
    """Return whether `decode` supports this model: it has only full or sliding attention caches."""
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    takes = inspect.signature(model.forward).parameters
    plain = kinds <= {DynamicLayer, DynamicSlidingWindowLayer} and takes.keys() >= _ARGUMENTS
    return plain and _cache_argument(model) in takes


def _cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the forward's cache, `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decode(model: PreTrainedModel, batch: Batch) -> None:
    """Sample the completions of a batch that shares prompts."""
    decoder = _Decoder(model)
    logits = decoder.prefill(batch.prompts, batch.owners)
    while True:
        tokens = batch.sample(logits)
        if not batch.left:
            return
        if batch.left < DROP_BELOW * len(tokens):
            stay = batch.drop_ended()
            decoder.select(stay)
            tokens = tokens[stay]
        logits = decoder.step(tokens)


class _Decoder:
    """A cache of B rows, padded on the left, that grows by one token per row and step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.passed: Any = {_cache_argument(model): self.cache}
        self.positions = torch.empty(0)  # (B, 1) int64, of the last token of each row
        self.mask: Tensor | None = None  # (B, tokens) bool; None: nothing is padded

    def prefill(self, prompts: Sequence[Sequence[int]], owners: Tensor) -> Tensor:
        """Prefill U prompts, copy the cache for `owners` (R,), and return (R, V) logits."""
        device = self.model.device
        common = 0 if any(self.cache.is_sliding) else common_length(prompts)
        if common:
            # The cache is laid out as [common prefix | padding | rest].
            ids = torch.tensor([prompts[0][:common]], device=device)
            self._forward(ids, torch.arange(common, device=device)[None])
            self.cache.batch_repeat_interleave(len(prompts))
        longest = max(map(len, prompts))
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        ids = torch.tensor([[0] * (longest - len(p)) + list(p[common:]) for p in prompts], device=device)
        real = (torch.arange(longest - common) >= pads[:, None]).to(device)
        positions = common + (real.cumsum(-1) - 1).clamp(min=0)
        if pads.any():
            self.mask = torch.cat([real.new_ones(len(prompts), common), real], 1)
        self.positions = positions[:, -1:]
        logits = self._forward(ids, positions)
        if len(owners) > len(prompts):
            self.select(owners)
        return logits[owners]

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` (B,), and return the next (B, V) logits."""
        self.positions = self.positions + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], self.positions)

    def select(self, rows: Tensor) -> None:
        """Select (B',) int64 rows, possibly repeated."""
        self.cache.batch_select_indices(rows)
        self.positions = self.positions[rows]
        self.mask = None if self.mask is None else self.mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Append `ids` (B, t) to the cache, and return the (B, V) logits of the last column."""
        # A negative number would slice the hidden states; torch.matmul does not fold such a strided batch and
        # repeats the head for each row.
        last = 0 if ids.shape[1] == 1 else torch.tensor([ids.shape[1] - 1], device=ids.device)
        output: Any = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.mask,
            **self.passed,
            use_cache=True,
            logits_to_keep=last,
        )
        return output.logits[:, -1]


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, leaving one or more of each; 0 where they are few."""
    ordered = sorted(map(tuple, prompts))
    first, last = ordered[0], ordered[-1]  # all that sort between them share their common prefix
    limit = min(map(len, prompts)) - 1
    common = next((i for i in range(limit) if first[i] != last[i]), limit)
    return common if len(prompts) > 1 and common >= WORTH_SHARING else 0
