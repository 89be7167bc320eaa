"""dW and dbias of the kept pairs: Gᵀ X over each tile's gathered rows, without atomics.

One program per (vocabulary tile, columns of H) sums in float32 registers over the tile's rows in ascending
order, and stores or adds once: no float32 copy of the weight. The tile of a frequent token has many times the
rows of another, so the GPU's scheduler balances the tiles, not a fixed assignment
(`benchmarks/results/tried.md`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import TILE
from .product import precision
from .sparse_pairs import SparseOperands


def weight_gradient(
    operands: SparseOperands, gradients: Tensor, hidden: Tensor, into: Tensor, *, accumulate: bool
) -> None:
    """Write Gᵀ `hidden`, (V, K), or add it to `into`; where the pairs did not fit, leave `into` unchanged.

    Args:
        hidden: (N, K), the hidden states, or ones for the bias.
    """
    pairs, config = operands.pairs, operands.config
    # An accumulated float32 gradient needs as many registers again, twice those of a half.
    wide = accumulate and into.dtype == torch.float32
    columns = min(config.weight_columns, 64) if wide else config.weight_columns
    grid = pairs.offsets.numel() - 1, triton.cdiv(hidden.shape[1], columns)
    _weight_gradient[(grid[0] * grid[1],)](
        hidden, gradients, operands.unit, pairs, into, into.shape[0], hidden.shape[1], hidden.stride(0),
        into.stride(0),
        TILE=TILE, ACCUMULATE=accumulate, PRECISION=precision(hidden.dtype),
        COLUMNS=columns, DEPTH=config.weight_depth,
        num_warps=config.weight_warps, num_stages=config.weight_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocabulary"])
def _weight_gradient(
    hidden,  # (N, H)
    gradients,  # (capacity, TILE)
    unit,  # (1,) float32 or None
    pairs,  # `Pairs`
    weight_gradient,  # (V, H), written or added to
    vocabulary,
    depth,
    hidden_stride,
    gradient_stride,
    TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """COLUMNS of H of one tile; neighbouring programs share a tile."""
    if tl.load(pairs.fits) == 0:
        return
    parts = tl.cdiv(depth, COLUMNS)
    tile = tl.program_id(0) // parts
    column = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < depth
    token = tl.arange(0, TILE)
    begin, end = tl.load(pairs.offsets + tile), tl.load(pairs.offsets + tile + 1)
    if ACCUMULATE and begin == end:
        return
    total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    for start in range(begin, end, DEPTH):
        pair = start + tl.arange(0, DEPTH)
        valid = pair < end
        row = tl.load(pairs.rows + pair, mask=valid, other=0).to(tl.int64)
        x = tl.load(
            hidden + row[:, None] * hidden_stride + column[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        )
        place = tl.load(pairs.places + pair, mask=valid, other=0).to(tl.int64)
        gradient = tl.load(gradients + place[:, None] * TILE + token[None, :], mask=valid[:, None], other=0.0)
        total = tl.dot(tl.trans(gradient), x, total, input_precision=PRECISION)
    token += tile * TILE
    stored = (token < vocabulary)[:, None] & inside[None, :]
    place = weight_gradient + token.to(tl.int64)[:, None] * gradient_stride + column[None, :]
    if unit is not None:
        total *= 1.0 / tl.load(unit)
    if ACCUMULATE:
        total += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, total.to(weight_gradient.dtype.element_ty), mask=stored)
