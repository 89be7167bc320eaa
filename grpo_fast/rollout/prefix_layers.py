"""What a layer holds of prompts, once, and of completions: keys and values, latents, states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from grpo_fast.rollout.decoder import selected

FIRST_CAPACITY = 16  # tokens a row's buffer holds at first; it doubles when full


class SuffixLayer(DynamicLayer):
    """One layer's keys and values: U prefixes, read-only, and the R rows' own tokens in a growing buffer.

    The first `apart` tokens of all prefixes are the same, and held once. `keys` and `values` (R, heads, t, D)
    are views of the buffers' first t tokens, which `torch.cat`, as in the parent, would copy at each token.
    """

    def __init__(self, prefix: DynamicLayer, owners: Tensor, max_new: int, apart: int) -> None:
        super().__init__()
        keys, values = cast(Tensor, prefix.keys), cast(Tensor, prefix.values)
        # CPUs multiply fp32 batches as fast as bf16 ones; converting at each step would cost more.
        self.dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
        self.device = keys.device
        parts = [part.to(self.dtype) for part in self.stored(keys, values)]
        # Copies: a view would keep what all prefixes hold.
        common = [part[:1, :, :apart].clone() for part in parts]
        own = [part[:, :, apart:].clone() if apart else part for part in parts]
        self.common, self.prefix = self.shown(common), self.shown(own)  # (1 or U, heads, tokens, D) each
        self.max_new, self.length = max_new, 0
        self.own = [self._buffer(len(owners), part, FIRST_CAPACITY) for part in parts]
        self._show()
        self.is_initialized = True

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The tensors that are held for these."""
        return keys, values

    def shown(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, for attention, of what is held."""
        keys, values = stored
        return keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.length == self.own[0].shape[-2]:
            full, rows = self.own, len(key_states)
            self.own = [self._buffer(rows, part, 2 * self.length) for part in full]
            for longer, part in zip(self.own, full, strict=True):
                longer[:, :, : self.length] = part
        for buffer, states in zip(self.own, self.stored(key_states, value_states), strict=True):
            buffer[:, :, self.length] = states[:, :, 0]
        self.length += 1
        return self._show()

    def keep(self, rows: Tensor, prefixes: Tensor | None) -> None:
        """Select rows of the buffers and, unless None, of the prefixes."""
        self.own = [buffer[rows] for buffer in self.own]
        if prefixes is not None:
            self.prefix = (self.prefix[0][prefixes], self.prefix[1][prefixes])
        self._show()

    def _buffer(self, rows: int, like: Tensor, capacity: int) -> Tensor:
        return like.new_empty((rows, like.shape[1], min(capacity, self.max_new), like.shape[-1]))

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values = self.shown([b[:, :, : self.length] for b in self.own])
        return keys, values


class LatentLayer(SuffixLayer):
    """Of latent attention, compressed: one head, whose keys are the latents (rank,) and, behind them, the
    rotary keys of all heads, and whose values are the latents."""

    def __init__(self, prefix: DynamicLayer, owners: Tensor, max_new: int, apart: int) -> None:
        self.rank = cast(Tensor, prefix.keys).shape[-1]
        super().__init__(prefix, owners, max_new, apart)

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([keys, values], -1),)

    def shown(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return stored[0], stored[0][..., : self.rank]

    def keep(self, rows: Tensor, prefixes: Tensor | None) -> None:
        super().keep(rows, None)
        if prefixes is not None:
            self.prefix = self.shown([self.prefix[0][prefixes]])


class SuffixAndStateLayer(LinearAttentionLayer, SuffixLayer):  # type: ignore[misc, override]
    """Of layers that attend and recur side by side."""

    def __init__(self, prefix: Any, owners: Tensor, max_new: int, apart: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=prefix.number_of_states)
        states = {name: vars(prefix)[name] for name in vars(self)}
        SuffixLayer.__init__(self, prefix, owners, max_new, apart)
        del states["device"], states["dtype"]  # of the states
        vars(self).update(selected(states, owners, len(self.prefix[0])))

    def keep(self, rows: Tensor, prefixes: Tensor | None) -> None:
        self.reorder_cache(cast(torch.LongTensor, rows))
        SuffixLayer.keep(self, rows, prefixes)


def latent_of(model: nn.Module, index: int, layer: Any) -> Any:
    """The module of latent attention whose keys and values `layer`, the cache's at `index`, has compressed.

    transformers expands them (`expand_kv`) between its cache and attention. Where it does so by another name,
    or before the cache, they are held and attended to as any keys and values.
    """
    modules = (module for module in model.modules() if hasattr(module, "expand_kv"))
    rank = layer.keys.shape[-1] if isinstance(layer, DynamicLayer) and layer.keys is not None else None
    return next((m for m in modules if m.layer_idx == index and m.kv_lora_rank == rank), None)


@contextmanager
def unexpanded(latents: Iterable[Any]) -> Iterator[None]:
    """What these modules of latent attention have cached comes to attention as it is."""
    latents = [*latents]
    for module in latents:
        module.expand_kv = lambda latent, rotary: (latent, rotary)
    try:
        yield
    finally:
        for module in latents:
            del module.expand_kv


def expansion(module: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """(heads, D of keys, rank) and (heads, D of values, rank): a latent's keys but the rotary, and values.

    `like` has the dtype and the device that the module computes with.
    """
    up = module.kv_b_proj
    if type(up) is nn.Linear:
        weight = up.weight
    else:  # with adapters, or quantised
        weight = up(torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)).T
    keys, values = module.qk_nope_head_dim, module.v_head_dim
    return weight.reshape(-1, keys + values, module.kv_lora_rank).split([keys, values], 1)
