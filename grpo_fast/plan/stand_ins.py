"""Attention and head on the meta device: shapes in, shapes out, what they keep, what they need.

Nothing computes there, and fused kernels are not chosen: transformers' own attention would be counted with
T × T scores that no attention of ours holds, and our kernels do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

PLANNED_ATTENTION = "grpo_fast_planned"  # the name under which transformers finds `planned_attention`

Column = Literal["mask", "scores", "scores_transient", "head_kept", "head_forward", "head_backward"]
"""Bytes that are no line in the tokens: traced as tensors without a size, which a batch fills in."""


ColumnTensor = Callable[[Column], Tensor]
"""Makes a tensor that counts as the column's bytes for as long as it lives."""

Allocation = Column | tuple[tuple[int, ...], torch.dtype]
"""A tensor that an operator makes: a column of bytes, or of this shape and dtype."""


@dataclass(frozen=True)
class Footprint:
    """An operator by what an allocator sees of it. Holds no tensors, so checkpointing can drop them."""

    result: tuple[tuple[int, ...], torch.dtype]
    kept: tuple[Allocation, ...] = ()  # for the backward, besides the operands
    forward: tuple[Allocation, ...] = ()  # workspace during the forward
    backward: tuple[Allocation, ...] = ()
    keeps_result: bool = False

    def apply(self, *operands: Tensor | None) -> Tensor:
        """The result, whose backward makes a gradient of each operand that wants one."""
        return _Operator.apply(self, *operands)


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, footprint: Footprint, *operands: Tensor | None) -> Tensor:
        workspace = _allocate(footprint.forward)
        kept = _allocate(footprint.kept)
        del workspace
        (result,) = _allocate([footprint.result])
        ctx.footprint, ctx.count = footprint, len(operands)
        ctx.save_for_backward(*operands, *kept, *([result] if footprint.keeps_result else []))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[: ctx.count]
        workspace = _allocate(ctx.footprint.backward)
        wanted = zip(operands, ctx.needs_input_grad[1:], strict=True)
        gradients = [torch.empty_like(operand) if wants else None for operand, wants in wanted]
        del workspace
        return None, *gradients


def _allocate(allocations: Sequence[Allocation]) -> list[Tensor]:
    column = _tracing.get().column
    return [
        column(made) if isinstance(made, str) else torch.empty(made[0], dtype=made[1], device="meta")
        for made in allocations
    ]


@dataclass(frozen=True)
class Tracing:
    """What the attention does not see in its arguments."""

    attention: str
    masked: bool  # documents in which some do not see all that comes before them
    column: ColumnTensor


_UNTRACED = Tracing("", masked=False, column=lambda _: torch.empty(0, device="meta"))
_tracing: ContextVar[Tracing] = ContextVar("tracing", default=_UNTRACED)


@contextmanager
def traced(tracing: Tracing) -> Iterator[None]:
    """Attention is that of `tracing` in here; elsewhere it is a plain fused one."""
    token = _tracing.set(tracing)
    try:
        yield
    finally:
        _tracing.reset(token)


def register() -> None:
    """Make `PLANNED_ATTENTION` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(PLANNED_ATTENTION, planned_attention)
    AttentionMaskInterface.register(PLANNED_ATTENTION, sdpa_mask)


def planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D)."""
    tracing = _tracing.get()
    batch, heads, tokens = query.shape[:3]
    capped = tracing.attention == "sdpa" and softcap is not None
    if capped or (tracing.attention == "flex_attention" and heads & (heads - 1)):  # it wants powers of two
        repeats = heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    result = ((batch, tokens, heads, value.shape[-1]), query.dtype)
    row_numbers = ((batch, heads, tokens), torch.float32)
    if capped:  # a softmax that no fused kernel of a CPU knows: the scores are kept
        footprint = Footprint(result, ("scores",), ("scores_transient",), ("scores_transient",))
    else:  # every flash attention keeps its operands, its result and a number a row
        kept: tuple[Allocation, ...] = (row_numbers,)
        backward: tuple[Allocation, ...] = (row_numbers,)
        if tracing.attention == "sdpa" and tracing.masked:
            kept = (row_numbers, "mask")  # a boolean mask in the query's dtype, for each layer anew
        if tracing.attention == "flash_attention_2":
            backward = (row_numbers, (tuple(query.shape), torch.float32))  # sums over the keys' blocks
        footprint = Footprint(result, kept, backward=backward, keeps_result=True)
    out = footprint.apply(query, key, value)
    # With SDPA documents attend one by one, and are joined.
    return (out.clone() if tracing.attention == "sdpa" else out), None


def planned_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, H), (V, H) -> (N,) float32: the head, whose own bytes are columns."""
    footprint = Footprint(
        ((hidden.shape[0],), torch.float32), ("head_kept",), ("head_forward",), ("head_backward",)
    )
    return footprint.apply(hidden, weight, bias)
