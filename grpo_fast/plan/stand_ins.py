"""Attention and head on the meta device: shapes in, shapes out, what they keep, what they need.

Nothing computes there, and fused kernels are not chosen: transformers' own attention would be counted with
T × T scores that no attention of ours holds, and our kernels do not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

PLANNED_ATTENTION = "grpo_fast_planned"  # the name under which transformers finds `planned_attention`

Column = Literal["mask", "scores", "scores_transient", "head_kept", "head_forward", "head_backward"]
"""Bytes that are no line in the tokens. They are traced as tensors without a size, which a batch fills in."""
COLUMNS: tuple[Column, ...] = get_args(Column)

Allocation = Column | tuple[tuple[int, ...], torch.dtype]
"""A tensor that an operator makes: a column of bytes, or of this shape and dtype."""


def allocate(allocations: Sequence[Allocation]) -> list[Tensor]:
    """Tensors on the meta device; a column's has the shape (0, the column's index)."""
    return [
        torch.empty(0, COLUMNS.index(made), device="meta")
        if isinstance(made, str)
        else torch.empty(made[0], dtype=made[1], device="meta")
        for made in allocations
    ]


def column_of(tensor: Tensor) -> Column | None:
    """The column that a tensor stands for."""
    is_column = tensor.dim() == 2 and tensor.shape[0] == 0 and tensor.shape[1] < len(COLUMNS)
    return COLUMNS[tensor.shape[1]] if is_column else None


@dataclass(frozen=True)
class Footprint:
    """An operator by what an allocator sees of it. Holds no tensors, so checkpointing can drop them."""

    result: tuple[tuple[int, ...], torch.dtype]
    kept: tuple[Allocation, ...]  # for the backward, besides the operands
    forward: tuple[Allocation, ...] = ()  # workspace during the forward
    backward: tuple[Allocation, ...] = ()
    keeps_result: bool = False


class _Operator(torch.autograd.Function):
    """(footprint, *operands) -> the result; its backward makes a gradient of each operand that wants one."""

    @staticmethod
    def forward(ctx: Any, footprint: Footprint, *operands: Tensor | None) -> Tensor:
        workspace = allocate(footprint.forward)
        kept = allocate(footprint.kept)
        del workspace
        (result,) = allocate([footprint.result])
        ctx.footprint, ctx.count = footprint, len(operands)
        ctx.save_for_backward(*operands, *kept, *([result] if footprint.keeps_result else []))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[: ctx.count]
        workspace = allocate(ctx.footprint.backward)
        wanted = zip(operands, ctx.needs_input_grad[1:], strict=True)
        gradients = [torch.empty_like(operand) if wants else None for operand, wants in wanted]
        del workspace
        return None, *gradients


def register(attention: str = "", *, masked: bool = False) -> None:
    """Let transformers find `planned_attention`, from now on with these settings."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    planned = partial(planned_attention, attention=attention, masked=masked)
    AttentionInterface.register(PLANNED_ATTENTION, planned)
    AttentionMaskInterface.register(PLANNED_ATTENTION, sdpa_mask)


def planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: str,
    masked: bool,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D).

    Args:
        attention: as `resolve_attention` gives it; anything else stands for a plain fused one.
        masked: in documents some tokens do not see all that comes before them.
    """
    batch, heads, tokens = query.shape[:3]
    capped = attention == "sdpa" and softcap is not None
    if capped or (attention == "flex_attention" and heads & (heads - 1)):  # it wants powers of two
        repeats = heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    result = ((batch, tokens, heads, value.shape[-1]), query.dtype)
    row_numbers = ((batch, heads, tokens), torch.float32)
    if capped:  # a softmax that no fused kernel of a CPU knows: the scores are kept
        footprint = Footprint(result, ("scores",), ("scores_transient",), ("scores_transient",))
    else:  # every flash attention keeps its operands, its result and a number a row
        # SDPA's boolean mask is converted to the query's dtype, for each layer anew.
        kept: tuple[Allocation, ...] = (
            (row_numbers, "mask") if attention == "sdpa" and masked else (row_numbers,)
        )
        backward: tuple[Allocation, ...] = (row_numbers,)
        if attention == "flash_attention_2":
            backward = (row_numbers, (tuple(query.shape), torch.float32))  # sums over the keys' blocks
        footprint = Footprint(result, kept, backward=backward, keeps_result=True)
    out = _Operator.apply(footprint, query, key, value)
    # With SDPA documents attend one by one, and are joined.
    return (out.clone() if attention == "sdpa" else out), None


def planned_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, H), (V, H) -> (N,) float32: the head, whose own bytes are columns."""
    result = ((hidden.shape[0],), torch.float32)
    footprint = Footprint(result, ("head_kept",), ("head_forward",), ("head_backward",))
    return _Operator.apply(footprint, hidden, weight, bias)
