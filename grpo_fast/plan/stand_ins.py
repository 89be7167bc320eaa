"""Attention, fused layers and head on the meta device: shapes in and out, what they keep, what they need.

Nothing computes there, and fused kernels are not chosen: transformers' own attention would be counted with
T × T scores that no attention of ours holds, and our kernels do not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.policy import layers

PLANNED_ATTENTION = "grpo_fast_planned"  # the name under which transformers finds `planned_attention`

# What bytes are in proportion to, if they are not constant: a batch's input tokens, its targets, the tokens
# of one tile of an MLP, the tokens whose keys are copied for completions that share a prompt (by SDPA the
# completion's as well), and sizes that follow from none of them. In a trace each is a prime so large that a
# storage's bytes tell which.
UNITS = {
    "tokens": 2**40 - 87,
    "targets": 2**40 - 167,
    "tile": 2**40 - 437,
    "joined": 2**40 - 389,
    "mask": 2**40 - 195,
    "scores": 2**40 - 203,
    "scores_transient": 2**40 - 213,
    "head_kept": 2**40 - 285,
    "head_forward": 2**40 - 293,
    "head_backward": 2**40 - 299,
}

Allocation = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor that an operator makes."""


def bytes_of(unit: str) -> Allocation:
    return (UNITS[unit],), torch.uint8


def allocate(allocations: Sequence[Allocation]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in allocations]


@dataclass(frozen=True)
class Footprint:
    """An operator by what an allocator sees of it. Holds no tensors, so checkpointing can drop them."""

    result: Allocation
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


def register(attention: str = "") -> None:
    """Let transformers find `planned_attention`, from now on with these settings."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    planned = partial(planned_attention, attention=attention)
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
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, A, T, D), key and value (B, K, T, D) -> (B, T, A, D).

    Args:
        attention: as `resolve_attention` gives it; anything else stands for a plain fused one.
    """
    batch, heads, tokens = query.shape[:3]
    capped = attention == "sdpa" and softcap is not None
    if capped or (attention == "flex_attention" and heads & (heads - 1)):  # it wants powers of two
        repeats = heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    result = ((batch, tokens, heads, value.shape[-1]), query.dtype)
    row_numbers = ((batch, heads, tokens), torch.float32)
    # A completion that shares its prompt looks at a copy of it, with its own keys and values behind.
    copies = [((UNITS["joined"], *tensor.shape[1::2]), tensor.dtype) for tensor in (key, value)]
    joined = tuple(copies) if attention in ("sdpa", "flash_attention_2") else ()
    if capped:  # a softmax that no fused kernel of a CPU knows: the scores are kept
        transient = (bytes_of("scores_transient"),)
        footprint = Footprint(result, (bytes_of("scores"), *joined), transient, transient)
    else:  # every flash attention keeps its operands, its result and a number a row
        # SDPA's boolean masks are converted to the query's dtype, for each layer anew.
        kept = (row_numbers, *joined, *([bytes_of("mask")] if attention == "sdpa" else []))
        backward: tuple[Allocation, ...] = (row_numbers,)
        if attention == "flash_attention_2":
            # Queries' gradients are summed in float32; those of keys and values are formed for every head.
            per_head = [((count, heads, query.shape[-1]), query.dtype) for count in (tokens, UNITS["joined"])]
            backward = (row_numbers, (tuple(query.shape), torch.float32), *per_head, *per_head)
        footprint = Footprint(result, kept, backward=backward, keeps_result=True)
    out = _Operator.apply(footprint, query, key, value)
    # With SDPA completions attend one by one, and are put together.
    return (out.clone() if attention == "sdpa" else out), None


def fuse(model: nn.Module) -> None:
    """Norms and gated MLPs that keep what they read and no more, as Liger's kernels and torch.compile do."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_planned_norm, module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
            replaced = "plain_forward" if hasattr(module, "plain_forward") else "forward"
            setattr(module, replaced, MethodType(_planned_mlp, module))


def _planned_norm(norm: Any, hidden: Tensor) -> Tensor:
    result, of_rows = (tuple(hidden.shape), hidden.dtype), (tuple(hidden.shape[:-1]), torch.float32)
    return _Operator.apply(Footprint(result, (of_rows,)), hidden, norm.weight)


def _planned_mlp(mlp: Any, hidden: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
    return mlp.down_proj(_Operator.apply(Footprint((tuple(gate.shape), gate.dtype), ()), gate, up))


@contextmanager
def tiled() -> Iterator[None]:
    """Let two tiles stand for all of an MLP that is recomputed, however many there are."""
    own = layers._tiles, layers._result
    layers._tiles, layers._result = _planned_tiles, _planned_result
    try:
        yield
    finally:
        layers._tiles, layers._result = own


def _planned_tiles(tensor: Tensor) -> list[Tensor]:
    tile = tensor.reshape(1, -1, tensor.shape[-1])[:, : UNITS["tile"]]
    return [tile, tile]


def _planned_result(mlp: Any, hidden: Tensor) -> Tensor:
    before = torch.empty_like(hidden)  # the tiles' results, which are joined at the end
    mlp.plain_forward(_planned_tiles(hidden.detach())[0])
    return before.clone()


def planned_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, H), (V, H) -> (N,) float32: the head, whose own bytes are units."""
    result = ((hidden.shape[0],), torch.float32)
    kept, forward, backward = (bytes_of(f"head_{when}") for when in ("kept", "forward", "backward"))
    footprint = Footprint(result, (kept,), (forward,), (backward,))
    return _Operator.apply(footprint, hidden, weight, bias)
