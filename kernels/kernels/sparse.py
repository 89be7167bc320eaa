"""The head's backward over live pairs only: cost follows density, and no buffer follows the data.

On the lists of `select_pairs`, chunk by chunk of vocabulary tiles: the pairs' logit gradients
(`sparse_pairs`), dW and dbias from them (`sparse_weight`); then, over the single entries collected on the
way, dX (`sparse_rows`).

A live tile of a real row holds about one column that matters, so dX over entries reads a hundredth of what
dX over pairs would, and needs no atomics. Every sum has a fixed order: results are bit-equal from run to
run. The one atomic per program hands out addresses of entries, never adds gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import TILE
from .select import Pairs
from .sparse_pairs import SparseOperands, pair_gradient
from .sparse_rows import EntryLists, hidden_gradient
from .sparse_weight import bias_gradient as add_bias_gradient
from .sparse_weight import weight_gradient as add_weight_gradient


@dataclass(frozen=True)
class SparseGradients:
    """What was asked for; None where it was not.

    `dense` is (2,) int32 on the device. Where `dense[0]` is set nothing was written: the pairs overflowed.
    Where
    `dense[1]` is set `hidden` must come from elsewhere too: pairs or entries overflowed, or the entries
    miss the tolerance. The dense path fills in what is missing, guarded by the flag on the device or after
    the host has read it.
    """

    hidden: Tensor | None  # (N, H), dtype of hidden
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,)
    dense: Tensor
    left_out: Tensor  # (N,) float32: probability that the hidden gradient, else the weight's, leaves out


def sparse_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    pairs: Pairs,
    *,
    bias: Tensor | None = None,
    inv_temperature: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    want_hidden: bool = True,
    want_weight: bool = True,
    want_bias: bool = False,
    weight_gradient: Tensor | None = None,
    bias_gradient: Tensor | None = None,
) -> SparseGradients:
    """Gradients of Σ g·logprob (and what else went into `pairs`) from the live pairs. No host
    synchronisation.

    A weight or bias gradient that is not wanted costs nothing; wanted, it takes a workspace of `chunk_bytes`.

    Args:
        hidden: (N, H) float32, bfloat16 or float16; unit stride along H.
        weight: (V, H) of the same dtype; unit stride along H.
        targets: (N,) int64, as in the selection.
        logsumexp: (N,) float32, of the whole vocabulary.
        pairs: from `select_pairs` of the same batch.
        bias: (V,), any float dtype.
        inv_temperature: (N,) float32, or None for one.
        weight_gradient: (V, H) existing gradient to add into in place, any float dtype, unit stride along
            H; by default a new one of weight's dtype.
        bias_gradient: (V,) contiguous, the same for the bias.

    Raises:
        ValueError: for operands of unequal dtype, or one strided along H.
    """
    _check(hidden, weight, weight_gradient)
    operands = SparseOperands(
        hidden, weight, targets, logsumexp, bias, inv_temperature, logit_scale, softcap, pairs,
        unit=_gradient_unit(hidden.dtype, pairs, inv_temperature, logit_scale),
        row_scale=_row_scale(pairs.mass_gradient, inv_temperature, logit_scale),
    )  # fmt: skip
    lists = EntryLists.allocate(pairs, operands.rows) if want_hidden else None
    if want_weight or want_bias:
        add_to_weight, add_to_bias = weight_gradient is not None, bias_gradient is not None
        if want_weight and not add_to_weight:
            weight_gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if want_bias and not add_to_bias:
            bias_gradient = torch.empty_like(bias, memory_format=torch.contiguous_format)
        workspace = _workspace(operands)
        for chunk in range(pairs.chunk_tiles.numel() - 1):
            pair_gradient(operands, workspace, lists, chunk)
            if want_weight:
                add_weight_gradient(operands, workspace, weight_gradient, chunk, add_to_weight)
            if want_bias:
                add_bias_gradient(operands, workspace, bias_gradient, chunk, add_to_bias)
    elif want_hidden:
        pair_gradient(operands, None, lists, 0)
    d_hidden, missing, left_out = None, pairs.overflow, pairs.left_out
    if want_hidden:
        d_hidden, balanced = hidden_gradient(hidden, weight, targets, operands.row_scale, pairs, lists)
        missing, left_out = missing | lists.overflow() | balanced.unmet, balanced.left_out
    return SparseGradients(
        hidden=d_hidden,
        weight=weight_gradient if want_weight else None,
        bias=bias_gradient if want_bias else None,
        dense=torch.cat([pairs.overflow, missing]),
        left_out=left_out,
    )


def _check(hidden: Tensor, weight: Tensor, weight_gradient: Tensor | None) -> None:
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: cast one of them")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("weight_gradient", weight_gradient)):
        if tensor is not None and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            stride = tensor.stride(1)
            raise ValueError(f"{name} has stride {stride} in its last dimension: pass {name}.contiguous()")


def _row_scale(gradient: Tensor, inv_temperature: Tensor | None, logit_scale: float) -> Tensor:
    """Steepest slope of the logit in the product: a softcap only flattens it."""
    scale = gradient.abs() * abs(logit_scale)
    return scale if inv_temperature is None else scale * inv_temperature


def _gradient_unit(
    dtype: torch.dtype, pairs: Pairs, inv_temperature: Tensor | None, logit_scale: float
) -> Tensor:
    """(1,) float32 power of two by which stored logit gradients are multiplied.

    float16 ends at 6e-8: there the largest gradient is brought near 2^13, so that a probability of 1e-6 stays
    normal.
    """
    if dtype != torch.float16 or not pairs.left_out.numel():
        return torch.ones(1, dtype=torch.float32, device=pairs.left_out.device)
    gradient = torch.maximum(pairs.mass_gradient.abs(), pairs.target_gradient.abs())
    largest = _row_scale(gradient, inv_temperature, logit_scale)
    exponent = torch.floor(13 - torch.log2(largest.amax().clamp(min=2.0**-100))).clamp(-100, 100)
    return torch.exp2(exponent).reshape(1)


def _workspace(operands: SparseOperands) -> Tensor:
    tiles = operands.pairs.offsets.numel() - 1
    size = operands.hidden.element_size()
    pairs = operands.pairs.config.chunk_workspace_pairs(operands.rows, tiles, size)
    return operands.hidden.new_empty((pairs, TILE))
