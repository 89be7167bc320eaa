"""dW and dbias of the kept pairs: Gᵀ X over each tile's gathered rows, no atomics, no float32 copy of the
weight.

One program per (vocabulary tile, columns of H) sums in float32 registers over the tile's rows in ascending
order and stores, or adds to what is there, once. A frequent word's tile has many times the rows of another,
so no program has its share beforehand: the GPU hands tiles out as programs end
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


def weight_gradient(operands: SparseOperands, gradients: Tensor, into: Tensor, accumulate: bool) -> None:
    """Writes (V, H) `into`, or adds to it; leaves it alone where the pairs did not fit."""
    hidden, pairs, config = operands.call.hidden, operands.pairs, operands.config
    # What is added to takes as many registers again: of float32, twice a half's.
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


def bias_gradient(operands: SparseOperands, gradients: Tensor, into: Tensor) -> None:
    """Writes (V,) `into`; leaves it alone where the pairs did not fit."""
    pairs = operands.pairs
    _bias_gradient[(pairs.offsets.numel() - 1,)](
        gradients, operands.unit, pairs, into, into.shape[0],
        TILE=TILE, DEPTH=operands.config.weight_depth, num_warps=4,
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


@triton.jit(do_not_specialize=["vocabulary"])
def _bias_gradient(
    gradients,  # (capacity, TILE)
    unit,  # (1,) float32 or None
    pairs,  # `Pairs`
    bias_gradient,  # (V,), written
    vocabulary,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Column sums of one tile's logit gradients."""
    if tl.load(pairs.fits) == 0:
        return
    tile = tl.program_id(0)
    end = tl.load(pairs.offsets + tile + 1)
    token = tl.arange(0, TILE)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(tl.load(pairs.offsets + tile), end, DEPTH):
        pair = start + tl.arange(0, DEPTH)
        place = tl.load(pairs.places + pair, mask=pair < end, other=0).to(tl.int64)
        gradient = tl.load(
            gradients + place[:, None] * TILE + token[None, :], mask=(pair < end)[:, None], other=0.0
        )
        total += tl.sum(gradient.to(tl.float32), axis=0)
    if unit is not None:
        total *= 1.0 / tl.load(unit)
    token += tile * TILE
    tl.store(bias_gradient + token, total.to(bias_gradient.dtype.element_ty), mask=token < vocabulary)
