"""dW and dbias of the live pairs: Gᵀ X over each tile's gathered rows, no atomics, no float32 copy of the
weight.

One program per (vocabulary tile, columns of H) sums in float32 registers over the tile's rows in ascending
order and stores, or adds to what is there, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import TILE
from .product import precision, program_count
from .sparse_pairs import SparseOperands


def weight_gradient(
    operands: SparseOperands, workspace: Tensor, gradient: Tensor, chunk: int, accumulate: bool
) -> None:
    """Writes, or adds to, the rows of `gradient` (V, H) that belong to the chunk's tiles."""
    hidden, pairs, config = operands.problem.hidden, operands.pairs, operands.pairs.config
    _weight_gradient[(program_count(hidden.device, config.weight_programs),)](
        hidden, workspace, operands.unit, pairs.rows, pairs.offsets, pairs.chunk_tiles, gradient,
        operands.rows, gradient.shape[0], hidden.shape[1], hidden.stride(0), gradient.stride(0),
        chunk, operands.chunk_pairs,
        TILE=TILE, ACCUMULATE=accumulate, PRECISION=precision(hidden.dtype),
        COLUMNS=config.weight_columns, DEPTH=config.weight_depth,
        num_warps=config.weight_warps, num_stages=config.weight_stages,
    )  # fmt: skip


def bias_gradient(
    operands: SparseOperands, workspace: Tensor, gradient: Tensor, chunk: int, accumulate: bool
) -> None:
    """Writes, or adds to, the entries of `gradient` (V,) that belong to the chunk's tiles."""
    pairs = operands.pairs
    _bias_gradient[(pairs.offsets.numel() - 1,)](
        workspace, operands.unit, pairs.offsets, pairs.chunk_tiles, gradient,
        operands.rows, gradient.shape[0], chunk, operands.chunk_pairs,
        TILE=TILE, ACCUMULATE=accumulate, DEPTH=pairs.config.weight_depth, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "vocabulary", "chunk", "chunk_pairs"])
def _weight_gradient(
    hidden,  # (N, H)
    workspace,  # (chunk_pairs + N, TILE)
    unit,  # (1,) float32
    pair_rows,
    offsets,
    chunk_tiles,
    weight_gradient,  # (V, H), written or added to
    rows,
    vocabulary,
    depth,
    hidden_stride,
    gradient_stride,
    chunk,
    chunk_pairs,
    TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """dW of the chunk's tiles, COLUMNS of H at a time. Persistent; neighbouring programs share a tile."""
    first_tile, last_tile = tl.load(chunk_tiles + chunk), tl.load(chunk_tiles + chunk + 1)
    parts = tl.cdiv(depth, COLUMNS)
    before_chunk = chunk.to(tl.int64) * chunk_pairs - rows
    scale = 1.0 / tl.load(unit)
    for item in range(tl.program_id(0), (last_tile - first_tile) * parts, tl.num_programs(0)):
        tile = first_tile + item // parts
        column = (item % parts) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < depth
        token = tl.arange(0, TILE)
        begin, end = tl.load(offsets + tile), tl.load(offsets + tile + 1)
        total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
        for start in range(begin, end, DEPTH):
            pair = start + tl.arange(0, DEPTH)
            valid = pair < end
            row = tl.load(pair_rows + pair, mask=valid, other=0).to(tl.int64)
            x = tl.load(
                hidden + row[:, None] * hidden_stride + column[None, :],
                mask=valid[:, None] & inside[None, :],
                other=0.0,
            )
            place = (pair - before_chunk)[:, None] * TILE + token[None, :]
            gradient = tl.load(workspace + place, mask=valid[:, None], other=0.0)
            total = tl.dot(tl.trans(gradient), x, total, input_precision=PRECISION)
        token += tile * TILE
        stored = (token < vocabulary)[:, None] & inside[None, :]
        place = weight_gradient + token.to(tl.int64)[:, None] * gradient_stride + column[None, :]
        total *= scale
        if ACCUMULATE:
            total += tl.load(place, mask=stored, other=0.0).to(tl.float32)
        tl.store(place, total.to(weight_gradient.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows", "vocabulary", "chunk", "chunk_pairs"])
def _bias_gradient(
    workspace,  # (chunk_pairs + N, TILE)
    unit,  # (1,) float32
    offsets,
    chunk_tiles,
    bias_gradient,  # (V,), written or added to
    rows,
    vocabulary,
    chunk,
    chunk_pairs,
    TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Column sums of the chunk's logit gradients. One program per tile; tiles of other chunks have none."""
    tile = tl.program_id(0)
    if (tile >= tl.load(chunk_tiles + chunk)) & (tile < tl.load(chunk_tiles + chunk + 1)):
        begin, end = tl.load(offsets + tile), tl.load(offsets + tile + 1)
        before_chunk = chunk.to(tl.int64) * chunk_pairs - rows
        token = tl.arange(0, TILE)
        total = tl.zeros((TILE,), dtype=tl.float32)
        for start in range(begin, end, DEPTH):
            pair = start + tl.arange(0, DEPTH)
            place = (pair - before_chunk)[:, None] * TILE + token[None, :]
            gradient = tl.load(workspace + place, mask=(pair < end)[:, None], other=0.0)
            total += tl.sum(gradient.to(tl.float32), axis=0)
        total *= 1.0 / tl.load(unit)
        token += tile * TILE
        if ACCUMULATE:
            total += tl.load(bias_gradient + token, mask=token < vocabulary, other=0.0).to(tl.float32)
        tl.store(bias_gradient + token, total.to(bias_gradient.dtype.element_ty), mask=token < vocabulary)
