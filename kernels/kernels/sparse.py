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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import TILE
from .select import Pairs
from .sparse_pairs import SparseOperands, pair_gradient
from .sparse_rows import EntryLists, hidden_gradient
from .sparse_weight import bias_gradient as add_bias_gradient
from .sparse_weight import weight_gradient as add_weight_gradient

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, Wanted


@dataclass(frozen=True)
class SparseGradients:
    """What was asked for; None where it was not.

    `dense` is (2,) int32 on the device. Where `dense[0]` is set nothing was written: the pairs overflowed.
    Where `dense[1]` is set `hidden` must come from elsewhere too: pairs or entries overflowed, or the entries
    miss the tolerance. The dense path fills in what is missing.
    """

    hidden: Tensor | None  # (N, H), dtype of hidden
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,)
    dense: Tensor
    left_out: Tensor  # (N,) float32: probability that the hidden gradient, else the weight's, leaves out


def sparse_backward(problem: HeadProblem, logsumexp: Tensor, pairs: Pairs, wanted: Wanted) -> SparseGradients:
    """Gradients of Σ g·logprob (and what else went into `pairs`) from the live pairs. No host
    synchronisation.

    A weight or bias gradient that is not wanted costs nothing; wanted, it takes a workspace of `chunk_bytes`.

    Args:
        logsumexp: (N,) float32, of the whole vocabulary.
        pairs: from `select_pairs` of the same batch.
    """
    operands = SparseOperands(
        problem, logsumexp, pairs,
        unit=_gradient_unit(problem, pairs), row_scale=_row_scale(problem, pairs.mass_gradient),
    )  # fmt: skip
    lists = EntryLists.allocate(pairs, operands.rows) if wanted.hidden else None
    weight, bias = wanted.into_weight, wanted.into_bias
    if wanted.weight or wanted.bias:
        if wanted.weight and weight is None:
            weight = torch.empty_like(problem.weight, memory_format=torch.contiguous_format)
        if wanted.bias and bias is None:
            bias = torch.empty_like(problem.bias, memory_format=torch.contiguous_format)
        workspace = _workspace(operands)
        for chunk in range(pairs.chunk_tiles.numel() - 1):
            pair_gradient(operands, workspace, lists, chunk)
            if wanted.weight:
                add_weight_gradient(operands, workspace, weight, chunk, wanted.into_weight is not None)
            if wanted.bias:
                add_bias_gradient(operands, workspace, bias, chunk, wanted.into_bias is not None)
    elif wanted.hidden:
        pair_gradient(operands, None, lists, 0)
    hidden, missing, left_out = None, pairs.overflow, pairs.left_out
    if lists is not None:
        hidden, balanced = hidden_gradient(operands, lists)
        missing, left_out = missing | lists.overflow() | balanced.unmet, balanced.left_out
    return SparseGradients(
        hidden=hidden,
        weight=weight if wanted.weight else None,
        bias=bias if wanted.bias else None,
        dense=torch.cat([pairs.overflow, missing]),
        left_out=left_out,
    )


def _row_scale(problem: HeadProblem, gradient: Tensor) -> Tensor:
    """Steepest slope of the logit in the product: a softcap only flattens it."""
    scale = gradient.abs() * abs(problem.logit_scale)
    return scale if problem.inv_temperature is None else scale * problem.inv_temperature


def _gradient_unit(problem: HeadProblem, pairs: Pairs) -> Tensor:
    """(1,) float32 power of two by which stored logit gradients are multiplied.

    float16 ends at 6e-8: there the largest gradient is brought near 2^13, so that a probability of 1e-6 stays
    normal.
    """
    if problem.hidden.dtype != torch.float16 or not pairs.left_out.numel():
        return torch.ones(1, dtype=torch.float32, device=pairs.left_out.device)
    largest = _row_scale(problem, torch.maximum(pairs.mass_gradient.abs(), pairs.target_gradient.abs()))
    exponent = torch.floor(13 - torch.log2(largest.amax().clamp(min=2.0**-100))).clamp(-100, 100)
    return torch.exp2(exponent).reshape(1)


def _workspace(operands: SparseOperands) -> Tensor:
    tiles, hidden = operands.pairs.offsets.numel() - 1, operands.problem.hidden
    pairs = operands.pairs.config.chunk_workspace_pairs(operands.rows, tiles, hidden.element_size())
    return hidden.new_empty((pairs, TILE))
