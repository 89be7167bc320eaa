"""Attention over packed documents, as one more attention implementation of transformers.

A dense mask over a micro-batch of T tokens costs T² however short its documents are. Here a token is not
compared with what it cannot see: an SDPA call for each completion but the short ones, or one call of
flash-attention (`policy.flash`), so that a shared prompt saves its tokens and costs nothing. Both know the
sliding window of a layer, which a ready-made 4-D mask cannot, being the same for all layers.
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

PACKED_ATTENTION = "grpo_fast_packed"  # the name under which transformers finds `packed_attention`
ALIGNMENT = 8  # numbers of a head, of which SDPA's kernels for GPUs want a multiple


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
    """transformers' attention interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D).

    Without a layout (generation) this is transformers' SDPA, with the score softcap of Gemma 2 and the sinks
    of gpt-oss honoured.
    """
    sinks: Tensor | None = kwargs.get("s_aux")
    chosen = None
    if packed_layout is not None:
        chosen = packed_layout.attention
        packed_layout.windows.add(sliding_window)
    plain = packed_layout is None and softcap is None and sinks is None
    of_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if plain and query.shape[2] == 1 and of_all_heads and kwargs.get("position_bias") is None:
        # A token is decoded: query heads become queries of the key head that they share. transformers would
        # copy all keys and values for each of them, which on a CPU takes longer than the attention.
        folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
        output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(*query.shape[:3], -1).transpose(1, 2), None
    if plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if packed_layout is None:
        return _attend(query, key, value, attention_mask, scaling, softcap, sinks).transpose(1, 2), None
    if chosen in PACKAGES and sinks is None:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        sequences = packed_layout.sequences
        if len(sequences.index) > len(query):
            key, value = (repeated(tensor, sequences.index) for tensor in (key, value))
        return varlen_attention(chosen, query, key, value, sequences, scaling, sliding_window, softcap)[
            None
        ], None
    pieces = (packed_layout.own(query), packed_layout.seen(key), packed_layout.seen(value))
    outputs = [
        _attend(*piece, scaling, softcap, sinks)
        for piece in zip(*pieces, packed_layout.masks(sliding_window), strict=True)
    ]
    return torch.cat([output.transpose(1, 2) for output in outputs], dim=1), None


def flash_obstacle(config: PreTrainedConfig, *, softcaps: bool = False) -> str | None:
    """Why flash-attention, capping scores or not, cannot compute this model's; None: it can."""
    text = config.get_text_config()
    for found in head_dims(text):
        if found > 256 or found % 8:
            return f"the model's heads have {found} numbers, not a multiple of 8 up to 256"
    if getattr(text, "v_head_dim", None) is not None:
        return "the model's values are not as wide as its keys"
    if getattr(text, "attn_logit_softcapping", None) is not None and not softcaps:
        return "the model caps its scores, which needs flash-attn (pip install 'grpo-fast[flash-attn]')"
    return "the model has attention sinks" if has_sinks(config) else None


def head_dims(text: PreTrainedConfig) -> set[int]:
    """Numbers of a query or key of one head, of each kind of layer; 0 of those without heads."""
    found: set[int] = set()
    for layer in getattr(text, "per_layer_config", None) or [text]:  # Gemma 4's differ
        heads = getattr(layer, "num_attention_heads", 0)  # Mamba has none
        size = heads and (getattr(layer, "head_dim", None) or layer.hidden_size // heads)
        found |= {size, getattr(layer, "global_head_dim", None) or size}
    return found


def has_sinks(config: PreTrainedConfig) -> bool:
    """Whether the layers hand a score beside those of the keys to their attention, of which SDPA has none."""
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
    """Attention of one piece; a mask of None is causal, or everything for a single query.

    Args:
        sinks: (A,) a score of each head beside those of the keys, of no value.
    """
    causal = mask is None and query.shape[2] > 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and sinks is not None:
        return _attend_with_sinks(query, key, value, mask, scale, sinks, causal)
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.is_cuda:  # where heads share keys, SDPA keeps every score beside a mask
            repeats, grouped = query.shape[1] // key.shape[1], False
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, beside], -1)
    return scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype) @ value


def _attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor,
    causal: bool,
) -> Tensor:
    """By SDPA without a softcap: the sink is one more key, in front, whose value is zero.

    In numbers more of a query and a key, which are zero of all other keys, the product of these two is the
    head's sink. So no score is kept, and autograd knows the sinks' gradient.
    """
    width, of_value = query.shape[-1], value.shape[-1]
    wide = -(-max(width + 1, of_value) // ALIGNMENT) * ALIGNMENT  # all as wide, or SDPA keeps every score
    beside = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    first_key = key.new_zeros(wide)
    first_key[width] = 1 / scale
    # With a query in front as well, which looks at the sink alone, the diagonal of a causal mask stays.
    query = pad(torch.cat([query, beside], -1), (0, wide - width - 1, int(causal), 0))
    key = torch.cat([first_key.expand(*key.shape[:2], 1, wide), pad(key, (0, wide - width))], 2)
    value = pad(value, (0, wide - of_value, 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=float(mask.dtype == torch.bool))  # or it is added to the scores
    output = _attend(query, key, value, mask, scale, None, None)
    return output[:, :, int(causal) :, :of_value]


def register() -> None:
    """Make our attentions known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    # Its pieces differ from batch to batch: whatever is compiled around it, it is not.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
