"""Attention and head as an allocator sees them: shapes in, shapes out, what they keep, what they need.

On the meta device nothing computes, and fused kernels are not chosen there: transformers' own attention would
be counted with T × T scores that no attention of ours holds. What is known only as a formula of the batch (a
mask, the head's workspace) enters as a symbol: a tensor whose life is followed like any other's, and whose
size is filled in afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

ATTENTION = "grpo_fast_planned"  # the name under which transformers finds `planned_attention`

Symbol = Literal["mask", "scores", "scores_passing", "head_kept", "head_forward", "head_backward"]
"""The columns of bytes that are no line in the tokens."""


@dataclass(frozen=True)
class Setting:
    """What the stand-ins do not see in their arguments."""

    attention: Literal["sdpa", "flex_attention", "flash_attention_2"]
    masked: bool  # documents in which some do not see all that comes before them
    symbol: Callable[[Symbol], Tensor]  # a tensor that stands for as many bytes as the column says


_setting: ContextVar[Setting | None] = ContextVar("setting", default=None)


@contextmanager
def planning(setting: Setting) -> Iterator[None]:
    """Attention follows `setting` in here; elsewhere it is a plain fused one."""
    token = _setting.set(setting)
    try:
        yield
    finally:
        _setting.reset(token)


def register() -> None:
    """Make `ATTENTION` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(ATTENTION, planned_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


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
    setting = _setting.get()
    if setting is None:
        return _Fused.apply(query, key, value, None, False).transpose(1, 2), None
    mask = None
    if setting.attention == "sdpa" and softcap is not None:
        return _Scores.apply(query, key, value, setting.symbol).transpose(1, 2).clone(), None
    if setting.attention == "sdpa" and setting.masked:
        mask = setting.symbol("mask")  # boolean masks become ones of the query's dtype, for each layer anew
    if setting.attention == "flex_attention":
        heads = query.shape[1]
        if heads & (heads - 1):  # as transformers does where FlexAttention wants powers of two
            key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    out = _Fused.apply(query, key, value, mask, setting.attention == "flash_attention_2").transpose(1, 2)
    if setting.attention == "sdpa":
        out = out.clone()  # documents attend one by one and are put together
    return out, None


class _Fused(torch.autograd.Function):
    """Keeps its operands, its result and a number a row, as every flash attention does."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, accumulates: bool
    ) -> Tensor:
        # Memory runs as (B, T, A, D), whatever the order of the axes.
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.accumulates = accumulates
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        delta = query.new_empty(query.shape[:3], dtype=torch.float32)
        sums = query.new_empty(query.shape, dtype=torch.float32) if ctx.accumulates else None
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        del delta, sums
        return *gradients, None, None


class _Scores(torch.autograd.Function):
    """Softmax of capped scores, which no fused kernel of a CPU knows: the scores are kept."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, symbol: Callable[[Symbol], Tensor]
    ) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        passing = symbol("scores_passing")
        ctx.symbol, ctx.repeats = symbol, repeats
        ctx.save_for_backward(query, key, value, symbol("scores"))
        del passing
        return torch.empty_like(query)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _ = ctx.saved_tensors
        passing = ctx.symbol("scores_passing")
        gradients = [torch.empty_like(query)]
        gradients += [torch.empty_like(tensor[:, :: ctx.repeats]) for tensor in (key, value)]
        del passing
        return *gradients, None


def planned_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, symbol: Callable[[Symbol], Tensor]
) -> Tensor:
    """(N, H), (V, H) -> (N,) float32: the head, whose own bytes are symbols."""
    return _Head.apply(hidden, weight, bias, symbol)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, symbol: Callable[[Symbol], Tensor]
    ) -> Tensor:
        workspace = symbol("head_forward")
        ctx.symbol = symbol
        ctx.save_for_backward(hidden, weight, bias, symbol("head_kept"))
        del workspace
        return hidden.new_empty(hidden.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[:3]
        workspace = ctx.symbol("head_backward")
        wanted = ctx.needs_input_grad[:3]
        gradients = tuple(
            torch.empty_like(operand) if want else None
            for operand, want in zip(operands, wanted, strict=True)
        )
        del workspace
        return *gradients, None
