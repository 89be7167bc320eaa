"""Attention over packed documents, registered as an attention implementation of transformers.

A dense mask over T tokens would cost T² however short the documents are. Instead one SDPA call computes each
long completion, or some short ones, or one call of flash-attention (`policy.flash`) computes all. Both
support a sliding window per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from grpo_fast.policy.flash import PACKAGES, varlen_attention
from grpo_fast.policy.layout import PackedLayout, repeated
from grpo_fast.policy.vision import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PACKED_ATTENTION = "grpo_fast_packed"  # the name of `packed_attention` in transformers
ALIGNMENT = 8  # SDPA's GPU kernels need head sizes that are multiples of it


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D).

    Without a layout (generation) this is transformers' SDPA plus Gemma 2's softcap and gpt-oss's sinks.
    """
    sinks: Tensor | None = kwargs.get("s_aux")
    if packed_layout is None and (softcap is not None or sinks is not None):
        return _attend(query, key, value, attention_mask, scaling, softcap, sinks).transpose(1, 2), None
    if packed_layout is None:
        shared_mask = attention_mask is None or attention_mask.shape[1] == 1
        if query.shape[2] == 1 and shared_mask and kwargs.get("position_bias") is None:
            # Decoding: query heads become queries of the key head that they share. transformers would repeat
            # all keys and values, which on a CPU takes longer than the attention.
            folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
            output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
            return output.reshape(*query.shape[:3], -1).transpose(1, 2), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    packed_layout.windows.add(sliding_window)
    chosen = packed_layout.attention
    if chosen in PACKAGES and sinks is None:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        sequences = packed_layout.sequences
        if len(sequences.index) > len(query):
            key, value = (repeated(tensor, sequences.index) for tensor in (key, value))
        output = varlen_attention(chosen, query, key, value, sequences, scaling, sliding_window, softcap)
        return output[None], None
    pieces = (packed_layout.own(query), packed_layout.seen(key), packed_layout.seen(value))
    outputs = [
        _attend(*piece, scaling, softcap, sinks)
        for piece in zip(*pieces, packed_layout.masks(sliding_window), strict=True)
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


def flash_obstacle(config: PreTrainedConfig, *, softcaps: bool = False) -> str | None:
    """Return why flash-attention, with or without softcaps, does not support this model, or None."""
    text = config.get_text_config()
    for size in head_dims(text):
        if size > 256 or size % 8:
            return f"the model's heads have {size} numbers, not a multiple of 8 up to 256"
    if getattr(text, "v_head_dim", None) is not None:
        return "the model's values are not as wide as its keys"
    if getattr(text, "attn_logit_softcapping", None) is not None and not softcaps:
        return "the model caps its scores, which needs flash-attn (pip install 'grpo-fast[flash-attn]')"
    return "the model has attention sinks" if has_sinks(config) else None


def head_dims(text: PreTrainedConfig) -> set[int]:
    """Return the head sizes of the kinds of layers, 0 for layers without heads."""
    sizes: set[int] = set()
    for layer in getattr(text, "per_layer_config", None) or [text]:  # Gemma 4's differ
        heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
        size = heads and (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
        sizes |= {size, getattr(layer, "global_head_dim", None) or size}
    return sizes


def has_sinks(config: PreTrainedConfig) -> bool:
    """Return whether the layers have attention sinks, which SDPA does not support."""
    model = model_class(config)
    return model is not None and not model._supports_sdpa


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within one piece: query (B, A, Q, D), key (B, K, N, D), value (B, K, N, E) -> (B, A, Q, E).

    A mask of None is causal. `sinks` (A,) are additional scores without a value.
    """
    causal = mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and sinks is not None:
        return _attend_with_sinks(query, key, value, mask, scale, sinks, causal)
    grouped, repeats = query.shape[1] != key.shape[1], query.shape[1] // key.shape[1]
    if softcap is not None or (
        grouped and query.is_cuda
    ):  # with a mask, SDPA's grouped heads keep all scores
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        grouped = False
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], -1)
    return scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype) @ value


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor, causal: bool
) -> Tensor:
    """Attend with sinks by SDPA, which keeps no scores: the sink is a first key whose value is zero.

    Additional elements of queries and keys, zero for all other keys, multiply to the head's sink.
    """
    width, of_value = query.shape[-1], value.shape[-1]
    wide = -(-max(width + 1, of_value) // ALIGNMENT) * ALIGNMENT  # with other sizes SDPA keeps all scores
    sink_elements = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    first_key = key.new_zeros(wide)
    first_key[width] = 1 / scale
    # A first query, which sees only the sink, keeps the diagonal of a causal mask.
    query = pad(torch.cat([query, sink_elements], -1), (0, wide - width - 1, int(causal), 0))
    key = torch.cat([first_key.expand(*key.shape[:2], 1, wide), pad(key, (0, wide - width))], 2)
    value = pad(value, (0, wide - of_value, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=float(mask.dtype == torch.bool))  # other masks are added to scores
    output = _attend(query, key, value, mask, scale, None, None)
    return output[:, :, int(causal) :, :of_value]


def register() -> None:
    """Register our attention with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # Its pieces differ from batch to batch, so it must not be compiled.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
