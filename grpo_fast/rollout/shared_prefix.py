"""Prompts held once for all their completions: decoding that copies none of them.

The n completions of a prompt attend to the same prefix by one matrix product of all their queries with one
copy of its keys. Each row's own tokens are a second, short attention; the two are merged exactly by their
log-sum-exp (Hydragen, arXiv:2402.05099). What all prompts begin with, such as a system prompt, is prefilled
once for all of them. The states of recurrent layers are forked; the keys and values of latent attention stay
compressed (section 2.1 of arXiv:2405.04434).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_fast.rollout.decoder import ExpandedDecoder, InFlight, Prompt, selected
from grpo_fast.rollout.prefix_layers import (
    LatentLayer,
    SuffixAndStateLayer,
    SuffixLayer,
    expansion,
    latent_of,
    unexpanded,
)

if TYPE_CHECKING:
    from grpo_fast.plan.model_shape import ModelShape

SHARED_PREFIX_ATTENTION = "grpo_fast_shared_prefix"  # among transformers' implementations
WORTH_SHARING = 16  # tokens: a shorter common beginning is not worth a forward of its own
WORTH_APART = 128  # tokens: a shorter one is cheaper read with each prompt than by a product of its own


class SharedPrefixDecoder(ExpandedDecoder):
    """For models whose layers all attend to everything before them, by name."""

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        super().__init__(model, max_new)
        self.attention = SHARED_PREFIX_ATTENTION
        self.layers: list[SuffixLayer] = []
        self.latents: dict[int, Any] = {}  # modules of latent attention, by the index of their layer

    @classmethod
    def supports(cls, model: PreTrainedModel) -> bool:
        return takes_attention(model) and cached_kinds(model) == {DynamicLayer}

    @staticmethod
    def common(prompts: Sequence[Prompt]) -> int:
        """Tokens that all prompts begin with, and which are read once."""
        return common_length(prompts)

    @staticmethod
    def kv_tokens(held: InFlight) -> int:
        return held.prompts * held.longest + held.rows * held.max_new

    @classmethod
    def kv_bytes(cls, shape: ModelShape, held: InFlight, *, on_cpu: bool) -> int:
        widths = [layer.numbers for layer in shape.layers]
        growing = held.rows * max(widths) * held.max_new // 2  # a buffer that grows is copied
        numbers = cls.kv_tokens(held) * sum(widths) + growing
        return (4 if on_cpu else shape.itemsize) * numbers + held.rows * shape.states

    @classmethod
    def held_once(cls, prompts: Sequence[Prompt]) -> int:
        common = cls.common(prompts)
        return common if common >= WORTH_APART else 0

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        logits, apart = self.read(prompts, self.common(prompts)), self.held_once(prompts)
        self.owners, self.grid, self.positions = owners, Grid(owners), self.positions[owners]
        self.bias = None  # else (U, P), added to the scores of padded prompts
        if self.mask is not None:
            zeros = torch.zeros(self.mask.shape, device=self.mask.device)
            self.bias = zeros.masked_fill_(~self.mask, -torch.inf)[:, apart:]
            self.mask = None
        if type(self.cache) is not DynamicCache:
            raise NotImplementedError(f"{type(self.model).__name__} makes a cache of its own kind")
        layers = [self._forked(i, layer, owners, apart) for i, layer in enumerate(self.cache.layers)]
        self.layers = [layer for layer in layers if isinstance(layer, SuffixLayer)]
        self.cache = Cache(layers=layers)
        return logits[owners]

    def _forked(self, index: int, layer: Any, owners: Tensor, apart: int) -> Any:
        """What a layer of the prompts' cache becomes for the rows."""
        latent = latent_of(self.model, index, layer)
        if latent is not None:
            self.latents[index] = latent
        if not isinstance(layer, DynamicLayer):
            return selected(layer, owners, int(owners.max()) + 1)
        kind = LatentLayer if latent is not None else SuffixLayer
        if isinstance(layer, LinearAttentionLayer):
            kind = SuffixAndStateLayer
        return kind(layer, owners, self.max_new, apart)

    def step(self, tokens: Tensor) -> Tensor:
        self.positions = self.positions + 1
        self.attended = 0
        with unexpanded(self.latents.values()):
            logits = self.last_logits(tokens[:, None], self.positions, shared_prefix=self)
        if self.attended != len(self.layers):
            raise RuntimeError(
                f"{type(self.model).__name__} called the shared-prefix attention in {self.attended} of "
                f"{len(self.layers)} layers: it does not pass its keyword arguments on to attention, so its "
                "prompts would have been ignored"
            )
        return logits

    def keep(self, rows: Tensor) -> None:
        count = len(self.owners)
        self.owners, self.positions = self.owners[rows], self.positions[rows]
        held = self.grid.shape[0]
        self.grid = Grid(self.owners)
        prompts = self.grid.prompts if self.grid.shape[0] < held else None
        if prompts is not None:  # number the prompts that are left from 0
            self.owners = torch.searchsorted(prompts, self.owners)
            self.bias = None if self.bias is None else self.bias[prompts]
        for layer in self.cache.layers:
            if isinstance(layer, SuffixLayer):
                layer.keep(rows, prompts)
            else:
                selected(layer, rows, count)

    def attend(self, layer: SuffixLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query a row against its prompt and its own tokens.

        Args:
            query: (R, Hq, D), scaled, in the layer's dtype.
            keys, values: (R, Hkv, t, D) of the row's own tokens.

        Returns:
            (R, Hq, D) float32.
        """
        query = query.unflatten(1, (keys.shape[1], -1))  # (R, Hkv, rep, D)
        packed = self.grid.spread(query).transpose(1, 2)  # (U, Hkv, n, rep, D)
        bias = None if self.bias is None else self.bias[:, None, None]
        prefix = partial_attention(packed.flatten(2, 3), *layer.prefix, bias=bias)
        outs, lses = (self.grid.collect(x.unflatten(2, (-1, query.shape[2])).transpose(1, 2)) for x in prefix)
        own, own_lses = partial_attention(query, keys, values)
        merged, mass = torch.lerp(own, outs, torch.sigmoid(lses - own_lses)), torch.logaddexp(lses, own_lses)
        if layer.common[0].shape[-2]:
            together = query.transpose(0, 1).flatten(1, 2)[None]  # (1, Hkv, R * rep, D)
            common = partial_attention(together, *layer.common)
            outs, lses = (x[0].unflatten(1, query.shape[0:3:2]).transpose(0, 1) for x in common)
            merged = torch.lerp(merged, outs, torch.sigmoid(lses - mass))
        return merged.flatten(1, 2)


class HybridDecoder(SharedPrefixDecoder):
    """For models with recurrent layers among or beside those that attend: their states are forked.

    A state cannot be read past the padding between a common beginning and what follows, so there is none.
    """

    @classmethod
    def supports(cls, model: PreTrainedModel) -> bool:
        kinds, attending = cached_kinds(model), {DynamicLayer, LinearAttentionAndFullAttentionLayer}
        known = kinds <= {*attending, LinearAttentionLayer}
        return takes_attention(model) and known and kinds != {DynamicLayer} and bool(kinds & attending)

    @staticmethod
    def common(prompts: Sequence[Prompt]) -> int:
        return 0


def shares_prefix(model: PreTrainedModel, cache: Any) -> bool:
    """Whether a decoder of this file serves the model that makes this cache, unless a trial refuses it."""
    supported = any(way.supports(model) for way in (SharedPrefixDecoder, HybridDecoder))
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return supported and type(cache) is DynamicCache and softcap is None


def takes_attention(model: PreTrainedModel) -> bool:
    """Whether the model lets others compute its attention. Without this method of transformers: none does."""
    asks = getattr(model, "_can_set_attn_implementation", None)
    return asks is not None and asks()


def cached_kinds(model: PreTrainedModel) -> set[type]:
    """Of the layers of its cache."""
    config = model.config.get_text_config(decoder=True)
    return {type(layer) for layer in DynamicCache(config=config).layers}


class Grid:
    """Rows laid out as (prompt, completion): a rectangle, with holes where groups have lost members."""

    def __init__(self, owners: Tensor) -> None:
        self.prompts, inverse, counts = torch.unique(owners, return_inverse=True, return_counts=True)
        self.shape = (len(counts), int(counts.max()))
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(owners), device=owners.device) - first[inverse]
        full = len(owners) == self.shape[0] * self.shape[1]
        self.slots = None if full else inverse * self.shape[1] + rank  # (R,)

    def spread(self, rows: Tensor) -> Tensor:
        """(R, ...) -> (U, n, ...), zeros in the holes."""
        if self.slots is not None:
            cells = rows.new_zeros((self.shape[0] * self.shape[1], *rows.shape[1:]))
            rows = cells.index_copy_(0, self.slots, rows)
        return rows.unflatten(0, self.shape)

    def collect(self, cells: Tensor) -> Tensor:
        """(U, n, ...) -> (R, ...)."""
        cells = cells.flatten(0, 1)
        return cells if self.slots is None else cells[self.slots]


def common_length(prompts: Sequence[Prompt]) -> int:
    """How many tokens all prompts begin with, leaving each at least one of its own; 0 where few."""
    ordered = sorted(map(tuple, prompts))
    first, last = ordered[0], ordered[-1]  # what these two share, all that sort between them share
    limit = min(map(len, prompts)) - 1
    common = next((i for i in range(limit) if first[i] != last[i]), limit)
    return common if len(prompts) > 1 and common >= WORTH_SHARING else 0


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the log of its softmax's denominator, to merge parts by.

    Args:
        query: (B, H, M, D), scaled.
        keys, values: (B, H, L, D).
        bias: (B, 1, 1, L) float32, added to the scores.

    Returns:
        (B, H, M, D) and (B, H, M, 1), float32.
    """
    scores = matmul_fp32(query, keys.transpose(-1, -2))
    if bias is not None:
        scores += bias
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    mass = weights.sum(-1, keepdim=True)
    return matmul_fp32(weights.to(values.dtype), values) / mass, mass.log_() + peak


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """(B, H, M, K) @ (B, H, K, N) -> float32; bf16 factors, on CUDA only, without rounding the result."""
    if a.dtype == torch.float32:
        return a @ b
    product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return product.unflatten(0, a.shape[:2])


def shared_prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_prefix: SharedPrefixDecoder | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; without `shared_prefix`, in the prefill, it is SDPA.

    `query` (R, Hq, 1, D), `key` and `value` (R, Hkv, t, D); returns (R, 1, Hq, D).
    """
    if shared_prefix is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} attends with {name}; the shared prefix does not"
            )
    shared_prefix.attended += 1
    layer = next(
        (layer for layer in shared_prefix.layers if layer.keys is key and layer.values is value), None
    )
    if layer is None:
        raise NotImplementedError(
            f"{type(module).__name__} attends to other keys and values than those of its cache; the shared "
            "prefix does not"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, dtype = query[:, :, 0] * scale, query.dtype
    if not isinstance(layer, LatentLayer):
        return shared_prefix.attend(layer, query.to(layer.dtype), key, value)[:, None].to(dtype), None
    to_keys, to_values = expansion(module, query)
    plain, rotary = query.split([to_keys.shape[1], query.shape[-1] - to_keys.shape[1]], -1)
    query = torch.cat([torch.einsum("rhd,hdk->rhk", plain, to_keys), rotary], -1)
    out = shared_prefix.attend(layer, query.to(layer.dtype), key, value)
    return torch.einsum("rhk,hdk->rhd", out.to(dtype), to_values)[:, None], None


AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, sdpa_mask)
