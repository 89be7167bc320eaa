"""Decoding a group without copying its prompt.

The n completions of a prompt attend to the same prefix: one matrix product of all their queries with
one copy of its keys, instead of n products with n copies. Each row's own tokens are a second, short
attention; the two are merged exactly by their log-sum-exp (Hydragen, arXiv:2402.05099). What all
prompts begin with, such as a system prompt, is prefilled once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_fast.rollout.decoder import Prompt, last_position, left_pad

NAME = "grpo_fast_shared_prefix"
WORTH_SHARING = 16  # tokens: a shorter common beginning is not worth a forward of its own
FIRST_CAPACITY = 16  # tokens a row's buffer holds at first; it doubles when full


class SuffixLayer(DynamicLayer):
    """One layer's keys and values: U prefixes, read-only, and the R rows' own tokens in a growing buffer.

    `keys` and `values` (R, heads, t, D) are views of the buffer's first t tokens, which `torch.cat`, as
    in the parent, would copy at each token.
    """

    def __init__(self, keys: Tensor, values: Tensor, max_new: int) -> None:
        super().__init__()
        # CPUs multiply fp32 batches as fast as bf16 ones; converting at each step would cost more.
        self.work_dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
        self.prefix_keys = keys.to(self.work_dtype)  # (U, heads, P, D)
        self.prefix_values = values.to(self.work_dtype)
        self.max_new = max_new

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = self.work_dtype, key_states.device
        self.key_buffer, self.value_buffer = (
            states.new_empty(
                (*states.shape[:2], min(FIRST_CAPACITY, self.max_new), states.shape[-1]), dtype=self.dtype
            )
            for states in (key_states, value_states)
        )
        self._show(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.keys.shape[-2]
        if length == self.key_buffer.shape[-2]:
            self.key_buffer, self.value_buffer = map(self._grown, (self.key_buffer, self.value_buffer))
        self.key_buffer[:, :, length] = key_states[:, :, 0]
        self.value_buffer[:, :, length] = value_states[:, :, 0]
        self._show(length + 1)
        return self.keys, self.values

    def keep(self, rows: Tensor, prefixes: Tensor | None) -> None:
        """Select rows of the buffer and, unless none is given, of the prefixes."""
        if self.is_initialized:
            self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]
            self._show(self.keys.shape[-2])
        if prefixes is not None:
            self.prefix_keys, self.prefix_values = self.prefix_keys[prefixes], self.prefix_values[prefixes]

    def nbytes(self) -> int:
        own = self.key_buffer.nbytes + self.value_buffer.nbytes if self.is_initialized else 0
        return own + self.prefix_keys.nbytes + self.prefix_values.nbytes

    def _grown(self, buffer: Tensor) -> Tensor:
        length = buffer.shape[-2]
        longer = buffer.new_empty((*buffer.shape[:2], min(2 * length, self.max_new), buffer.shape[-1]))
        longer[:, :, :length] = buffer
        return longer

    def _show(self, length: int) -> None:
        self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]


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


class SharedPrefixDecoder:
    """For models whose layers all attend to everything before them, through transformers' interface."""

    attention = NAME

    def __init__(self, model: PreTrainedModel, max_new: int) -> None:
        self.model, self.max_new = model, max_new
        self.cache: Cache | None = None

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Full attention in every layer, called by name, and with nothing but a causal softmax in it."""
        config = model.config.get_text_config(decoder=True)
        plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        return (
            plain
            and model._supports_attention_backend
            and not getattr(config, "attn_logit_softcapping", None)
        )

    @staticmethod
    def kv_tokens(prompts: int, longest: int, rows: int, max_new: int) -> int:
        return prompts * longest + rows * max_new

    def prefill(self, prompts: Sequence[Prompt], owners: Tensor) -> Tensor:
        """See `Decoder`. Prefixes and suffixes are laid out as [common | padding | rest]."""
        device = self.model.device
        cache = DynamicCache(config=self.model.config)
        common = common_length(prompts)
        if common:
            head = torch.tensor([prompts[0][:common]], device=device)
            self._forward(head, torch.arange(common, device=device)[None], cache)
            cache.batch_repeat_interleave(len(prompts))
        ids, real = left_pad([prompt[common:] for prompt in prompts], device)
        positions = common + (real.cumsum(-1) - 1).clamp(min=0)
        mask = torch.cat([real.new_ones(len(prompts), common), real], dim=1)
        logits = self._forward(ids, positions, cache, attention_mask=mask)

        # (U, P), added to the scores; nothing to add without padding.
        self.bias = (
            None if mask.all() else torch.zeros(mask.shape, device=device).masked_fill_(~mask, -torch.inf)
        )
        self.owners, self.grid = owners, Grid(owners)
        self.positions = positions[owners, -1:]
        self.cache = Cache(
            layers=[SuffixLayer(layer.keys, layer.values, self.max_new) for layer in cache.layers]
        )
        return logits[owners]

    def step(self, tokens: Tensor) -> Tensor:
        self.positions = self.positions + 1
        self.attended = 0
        logits = self._forward(tokens[:, None], self.positions, self.cache, shared_prefix=self)
        if self.attended != len(self.cache.layers):
            raise RuntimeError(
                f"{type(self.model).__name__} called the shared-prefix attention in {self.attended} of "
                f"{len(self.cache.layers)} layers: it does not pass its keyword arguments on to attention, "
                "so its prompts would have been ignored"
            )
        return logits

    def keep(self, rows: Tensor) -> None:
        self.owners, self.positions = self.owners[rows], self.positions[rows]
        held = self.grid.shape[0]
        self.grid = Grid(self.owners)
        lost = self.grid.shape[0] < held
        if lost:  # number the prompts that are left from 0
            self.owners = torch.searchsorted(self.grid.prompts, self.owners)
            self.bias = None if self.bias is None else self.bias[self.grid.prompts]
        for layer in self.cache.layers:
            layer.keep(rows, self.grid.prompts if lost else None)

    def memory(self) -> int:
        return sum(layer.nbytes() for layer in self.cache.layers) if self.cache is not None else 0

    def attend(self, layer: SuffixLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query a row against its prompt and its own tokens.

        Args:
            query: (R, Hq, D), scaled, in the layer's working dtype.
            keys, values: (R, Hkv, t, D) of the row's own tokens.

        Returns:
            (R, Hq, D) float32.
        """
        heads = keys.shape[1]
        query = query.unflatten(1, (heads, -1))  # (R, Hkv, rep, D)
        packed = self.grid.spread(query).transpose(1, 2)  # (U, Hkv, n, rep, D)
        bias = None if self.bias is None else self.bias[:, None, None]
        prefix = partial_attention(packed.flatten(2, 3), layer.prefix_keys, layer.prefix_values, bias)
        outs, lses = (self.grid.collect(x.unflatten(2, (-1, query.shape[2])).transpose(1, 2)) for x in prefix)
        own, own_lses = partial_attention(query, keys, values)
        return torch.lerp(own, outs, torch.sigmoid(lses - own_lses)).flatten(1, 2)

    def _forward(self, ids: Tensor, positions: Tensor, cache: Cache, **kwargs: Any) -> Tensor:
        return self.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last_position(ids),
            **kwargs,
        ).logits[:, -1]


def common_length(prompts: Sequence[Prompt]) -> int:
    """How many tokens all prompts begin with, leaving each at least one of its own; 0 where few."""
    first, last = min(prompts), max(prompts)  # what these two share, all that sort between them share
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
    module: nn.Module,
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
    layer = shared_prefix.cache.layers[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = shared_prefix.attend(layer, (query[:, :, 0] * scale).to(layer.work_dtype), key, value)
    return out[:, None].to(query.dtype), None


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
