"""Prompts prefilled once, then one token a row and step: what the transformers engine decodes with.

`ExpandedDecoder` repeats each prompt's cache for its completions and leaves attention to the model, so it
serves any causal model. `SharedPrefixDecoder` copies no prompt: the n completions of a prompt attend to the
same prefix by one matrix product of all their queries with one copy of its keys. Each row's own tokens are a
second, short attention; the two are merged exactly by their log-sum-exp (Hydragen, arXiv:2402.05099). What
all prompts begin with, such as a system prompt, is prefilled once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_fast.policy.architecture import distance, rounding
from grpo_fast.policy.attention import PACKED_ATTENTION
from grpo_fast.policy.attention import register as register_packed_attention
from grpo_fast.policy.out_of_memory import is_out_of_memory

Prompt = Sequence[int]
KvLayer = tuple[int, int | None]
"""Numbers of a token's keys and values in one layer, and the tokens that a window keeps; None: all."""

SHARED_PREFIX_ATTENTION = "grpo_fast_shared_prefix"  # among transformers' implementations
WORTH_SHARING = 16  # tokens: a shorter common beginning is not worth a forward of its own
WORTH_APART = 128  # tokens: a shorter one is cheaper read with each prompt than by a product of its own
FIRST_CAPACITY = 16  # tokens a row's buffer holds at first; it doubles when full


class ExpandedDecoder:
    """R rows in flight, each continuing one of U prompts: the model's own attention, one cache entry a row.

    Args:
        max_new: tokens of the longest completion.

    Attributes:
        attention: transformers' name of the implementation that the model must be set to.
    """

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        self.model, self.max_new = model, max_new
        self.attention = (
            PACKED_ATTENTION if model._supports_sdpa else "eager"
        )  # SDPA with a softcap, as trained
        self.cache: Cache = DynamicCache(config=model.config)

    @staticmethod
    def kv_tokens(prompts: int, longest: int, rows: int, max_new: int) -> int:
        """Tokens whose keys and values are held at once for `rows` completions of `prompts` prompts."""
        return rows * (longest + max_new)

    @classmethod
    def kv_bytes(
        cls,
        layers: Sequence[KvLayer],
        *,
        prompts: int,
        longest: int,
        rows: int,
        max_new: int,
        itemsize: int,
        on_cpu: bool,
    ) -> int:
        """Bytes of keys and values at the end of the longest completion."""
        tokens = longest + max_new
        return itemsize * rows * sum(numbers * min(tokens, window or tokens) for numbers, window in layers)

    @staticmethod
    def held_once(prompts: Sequence[Prompt]) -> int:
        """Tokens that all prompts begin with, and whose keys and values are not held for each."""
        return 0

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        """Read U prompts. `owners` (R,) int64, ascending, is the prompt of each row. (R, V) logits."""
        logits = self.read(prompts, 0)
        if len(owners) > len(prompts):
            self.keep(owners)
        return logits[owners]

    def read(self, prompts: Sequence[Prompt], common: int) -> Tensor:
        """(U, V) logits. The cache is laid out as [the common beginning | padding | rest]."""
        device = self.model.device
        if common:
            ids = torch.tensor([list(prompts[0][:common])], device=device)
            last_logits(self.model, ids, torch.arange(common, device=device)[None], self.cache)
            self.cache.batch_repeat_interleave(len(prompts))
        longest = max(map(len, prompts)) - common
        pads = [common + longest - len(prompt) for prompt in prompts]
        rest = [[0] * pad + list(prompt[common:]) for pad, prompt in zip(pads, prompts, strict=True)]
        real = (torch.arange(longest) >= torch.tensor(pads)[:, None]).to(device)
        positions = common + (real.cumsum(-1) - 1).clamp(min=0)  # a pad's position is never looked at
        self.mask, self.positions = (
            torch.cat([real.new_ones(len(prompts), common), real], 1),
            positions[:, -1:],
        )
        ids = torch.tensor(rest, device=device)
        return last_logits(self.model, ids, positions, self.cache, attention_mask=self.mask)

    def step(self, tokens: Tensor) -> Tensor:
        """Append `tokens` (R,) int64. (R, V) logits of the next ones."""
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return last_logits(self.model, tokens[:, None], self.positions, self.cache, attention_mask=self.mask)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only: ascending indices, int64, into the present ones."""
        self.cache.reorder_cache(cast(torch.LongTensor, rows))  # the one selection every kind of layer has
        self.mask, self.positions = self.mask[rows], self.positions[rows]


class SharedPrefixDecoder(ExpandedDecoder):
    """For models whose layers all attend to everything before them, by name."""

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        super().__init__(model, max_new)
        self.attention = SHARED_PREFIX_ATTENTION
        self.layers: list[SuffixLayer] = []

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Full attention in every layer; the rest `agrees` tells."""
        config = model.config.get_text_config(decoder=True)
        return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)

    @staticmethod
    def agrees(model: PreTrainedModel) -> str | None:
        """What is wrong with its logits of a short draw; None: they are those of `ExpandedDecoder`."""
        tokens = torch.randint(
            model.config.get_text_config().vocab_size,
            (2 * WORTH_SHARING,),
            generator=torch.Generator().manual_seed(0),
        ).to(model.device)
        one, other = tokens[:-3].tolist(), tokens[:-6].tolist()
        owners, kept = (torch.tensor(rows, device=model.device) for rows in ([0, 0, 1], [0, 2]))
        drawn: list[Tensor] = []
        for kind in (ExpandedDecoder, SharedPrefixDecoder):
            decoder = kind(model, 3)
            model.set_attn_implementation(decoder.attention)
            try:
                logits = [decoder.prefill([one, [*other, one[0]]], owners), decoder.step(tokens[-3:])]
                decoder.keep(kept)
                drawn.append(torch.cat([*logits, decoder.step(tokens[-2:])]).float())
            except Exception as failure:
                if kind is ExpandedDecoder or is_out_of_memory(failure):
                    raise
                return str(failure)
        error = distance(drawn[1], drawn[0])
        return None if error <= rounding(model, one) else f"its logits are {error:.2g} of their norm off"

    @staticmethod
    def kv_tokens(prompts: int, longest: int, rows: int, max_new: int) -> int:
        return prompts * longest + rows * max_new

    @classmethod
    def kv_bytes(
        cls,
        layers: Sequence[KvLayer],
        *,
        prompts: int,
        longest: int,
        rows: int,
        max_new: int,
        itemsize: int,
        on_cpu: bool,
    ) -> int:
        widths = [numbers for numbers, _ in layers]
        growing = rows * max(widths) * max_new // 2  # a buffer that grows is copied
        held = cls.kv_tokens(prompts, longest, rows, max_new) * sum(widths)
        return (4 if on_cpu else itemsize) * (held + growing)

    @staticmethod
    def held_once(prompts: Sequence[Prompt]) -> int:
        common = common_length(prompts)
        return common if common >= WORTH_APART else 0

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        logits, apart = self.read(prompts, common_length(prompts)), self.held_once(prompts)
        self.owners, self.grid, self.positions = owners, Grid(owners), self.positions[owners]
        self.bias = None  # else (U, P), added to the scores of padded prompts
        if not self.mask.all():
            zeros = torch.zeros(self.mask.shape, device=self.mask.device)
            self.bias = zeros.masked_fill_(~self.mask, -torch.inf)[:, apart:]
        caches = cast("list[DynamicLayer]", self.cache.layers)
        self.layers = [SuffixLayer(layer, len(owners), self.max_new, apart) for layer in caches]
        self.cache = Cache(layers=list(self.layers))
        return logits[owners]

    def step(self, tokens: Tensor) -> Tensor:
        self.positions = self.positions + 1
        self.attended = 0
        logits = last_logits(self.model, tokens[:, None], self.positions, self.cache, shared_prefix=self)
        if self.attended != len(self.layers):
            raise RuntimeError(
                f"{type(self.model).__name__} called the shared-prefix attention in {self.attended} of "
                f"{len(self.layers)} layers: it does not pass its keyword arguments on to attention, so its "
                "prompts would have been ignored"
            )
        return logits

    def keep(self, rows: Tensor) -> None:
        self.owners, self.positions = self.owners[rows], self.positions[rows]
        held = self.grid.shape[0]
        self.grid = Grid(self.owners)
        prompts = self.grid.prompts if self.grid.shape[0] < held else None
        if prompts is not None:  # number the prompts that are left from 0
            self.owners = torch.searchsorted(prompts, self.owners)
            self.bias = None if self.bias is None else self.bias[prompts]
        for layer in self.layers:
            layer.keep(rows, prompts)

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


class SuffixLayer(DynamicLayer):
    """One layer's keys and values: U prefixes, read-only, and the R rows' own tokens in a growing buffer.

    The first `apart` tokens of all prefixes are the same, and held once. `keys` and `values` (R, heads, t, D)
    are views of the buffers' first t tokens, which `torch.cat`, as in the parent, would copy at each token.
    """

    def __init__(self, prefix: DynamicLayer, rows: int, max_new: int, apart: int) -> None:
        super().__init__()
        keys, values = cast(Tensor, prefix.keys), cast(Tensor, prefix.values)
        # CPUs multiply fp32 batches as fast as bf16 ones; converting at each step would cost more.
        self.dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
        self.device = keys.device
        keys, values = keys.to(self.dtype), values.to(self.dtype)
        # Copies: a view would keep what all prefixes hold.
        self.common = (keys[:1, :, :apart].clone(), values[:1, :, :apart].clone())  # (1, heads, apart, D)
        self.prefix = (keys[:, :, apart:], values[:, :, apart:])  # (U, heads, P, D)
        if apart:
            self.prefix = (self.prefix[0].clone(), self.prefix[1].clone())
        self.max_new, self.length = max_new, 0
        self.own = [self._buffer(rows, part, FIRST_CAPACITY) for part in self.prefix]
        self._show()
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.length == self.own[0].shape[-2]:
            full, rows = self.own, len(key_states)
            self.own = [self._buffer(rows, part, 2 * self.length) for part in full]
            for longer, part in zip(self.own, full, strict=True):
                longer[:, :, : self.length] = part
        for buffer, states in zip(self.own, (key_states, value_states), strict=True):
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
        self.keys, self.values = keys, values = [buffer[:, :, : self.length] for buffer in self.own]
        return keys, values


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


def last_logits(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: Cache, **options: Any
) -> Tensor:
    """(B, V) of the last column of `ids` (B, t), whose keys and values join the cache."""
    # As a number, `logits_to_keep` would make the model slice its hidden states; the product with the head
    # then repeats the whole head for every row (torch.matmul does not fold a strided batch). An index copies
    # the rows instead.
    last = torch.tensor([ids.shape[1] - 1], device=ids.device)
    options |= {"past_key_values": cache, "use_cache": True, "logits_to_keep": last}
    return model(input_ids=ids, position_ids=positions, **options).logits[:, -1]


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
    layer = shared_prefix.layers[module.layer_idx]
    if key is not layer.keys or value is not layer.values:
        raise NotImplementedError(
            f"{type(module).__name__} attends to other keys and values than those of its cache; the shared "
            "prefix does not"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = shared_prefix.attend(layer, (query[:, :, 0] * scale).to(layer.dtype), key, value)
    return out[:, None].to(query.dtype), None


register_packed_attention()
AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, sdpa_mask)
