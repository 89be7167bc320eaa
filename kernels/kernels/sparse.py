"""The head's backward over live pairs only: cost follows density.

On the lists of `select`: the pairs' logit gradients (`sparse_pairs`), dW and dbias from them
(`sparse_weight`), and dX over the single entries that count (`sparse_rows`). Every sum has a fixed order:
results are bit-equal from run to run. Nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BF16_ROUNDING
from .balance import total_of
from .coefficients import RowCoefficients
from .pairs import list_pairs
from .select import Live
from .sparse_pairs import SparseOperands, pair_gradients
from .sparse_rows import hidden_gradient, keep_entries
from .sparse_weight import bias_gradient, weight_gradient

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, Wanted

    from . import SparseConfig


@dataclass(frozen=True)
class SparseGradients:
    """What was asked for; None where it was not. Nothing is written where the pairs did not fit."""

    hidden: Tensor | None  # (N, H), dtype of hidden
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,)
    left_out: Tensor  # (N,) float32: probability that the hidden gradient, else the weight's, leaves out


def sparse_backward(
    problem: HeadProblem,
    rows: RowCoefficients,
    live: Live,
    wanted: Wanted,
    certificate: Tensor,
    *,
    tolerance: float,
    capacity: int,
    config: SparseConfig,
) -> SparseGradients:
    """Gradients of Σ g·logprob (and what else went into `rows`) from at most `capacity` live pairs.

    Args:
        problem: its operands have unit stride along H.
        live: from `select_live` of the same batch, with the same tolerance.
        certificate: (4,) float32, filled as `certify` does.
    """
    operands = SparseOperands.of(problem, rows, live, list_pairs(live, capacity, config), config)
    gradients = pair_gradients(operands)
    weight, bias, hidden, left_out = wanted.into_weight, wanted.into_bias, None, live.left_out
    if wanted.weight:
        if weight is None:
            weight = torch.empty_like(problem.weight, memory_format=torch.contiguous_format)
        weight_gradient(operands, gradients, weight, wanted.into_weight is not None)
    if wanted.bias:
        if bias is None:
            bias = torch.empty_like(problem.bias, memory_format=torch.contiguous_format)
        bias_gradient(operands, gradients, bias, wanted.into_bias is not None)
    if wanted.hidden:
        kept, left_out = keep_entries(operands, gradients, tolerance)
    certify(operands, left_out, certificate)
    if wanted.hidden:
        hidden = hidden_gradient(operands, gradients, kept)
    return SparseGradients(hidden, weight if wanted.weight else None, bias if wanted.bias else None, left_out)


def certify(operands: SparseOperands, left_out: Tensor, numbers: Tensor) -> None:
    """Fills (4,) float32.

    Live pairs of all pairs, those of rows set apart among them; probability left out, its mean over the rows
    with a gradient and its largest; and the certified error in units of the certified error of rounding the
    logit gradient to bfloat16, at most the tolerance.
    """
    rows, live = operands.rows, operands.live
    _certificate[(1,)](
        rows.mass, rows.squares, live.count, live.dense, live.found, left_out, numbers, left_out.numel(),
        rows.squares.numel(), live.tile_counts.numel(), UNIT=BF16_ROUNDING, BLOCK=2048, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "parts", "tiles"])
def _certificate(
    mass_gradient,  # (N,) float32
    squares,  # (P,) float32
    live_count,  # (N,) int32
    dense_rows,  # (N,) bool
    found,  # (2,) int64
    left_out,  # (N,) float32
    numbers,  # (4,) float32, written
    rows,
    parts,
    tiles,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    active = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    error = tl.zeros((BLOCK,), dtype=tl.float32)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        dense = tl.load(dense_rows + row, mask=inside, other=0) != 0
        left = tl.load(left_out + row, mask=inside & ~dense, other=0.0)
        live = tl.load(live_count + row, mask=inside, other=0) > 0
        cost = tl.load(mass_gradient + row, mask=inside, other=0.0) * left
        active += (live | dense).to(tl.float32)
        total += left
        error += tl.where(cost == cost, cost * cost, 0.0)
        largest = tl.maximum(largest, left)
    error_sum = tl.sum(error)
    pairs = tl.load(found).to(tl.float32) + tl.load(found + 1).to(tl.float32) * tiles
    bound = tl.sqrt(error_sum / total_of(squares, parts, BLOCK)) / UNIT
    tl.store(numbers, pairs / tl.maximum(rows * 1.0 * tiles, 1.0))
    tl.store(numbers + 1, tl.sum(total) / tl.maximum(tl.sum(active), 1.0))
    tl.store(numbers + 2, tl.max(largest))
    tl.store(numbers + 3, tl.where(error_sum > 0.0, bound, 0.0))
