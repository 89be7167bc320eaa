"""The logit gradient of every live pair, from recomputed logits.

One program per block of gathered rows of one vocabulary tile. The product stays in float32 registers. Two
things leave them: for dW the gradients themselves, rounded to the operands' dtype, into a workspace that
holds a chunk of tiles at a time; for dX the *entries*, the few columns of a tile that matter, in float32.

An entry leaves when it is not far below the row's threshold for tiles; what stays behind is summed per pair,
so that `sparse_rows` knows what it starts from. Emitting with one atomic per entry spilled and cost more than
the product; here a row's entries are counted first, one atomic per program reserves a run for all of them,
and the columns are scanned in quarters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from . import EMIT_SHARE, TILE
from .product import (
    gathered_products,
    precision,
    program_count,
    transform_arguments,
    transform_logits,
    untransform_gradient,
)
from .select import Pairs
from .sparse_rows import EntryLists, popcount

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem


@dataclass(frozen=True)
class SparseOperands:
    """What every kernel of one backward reads. `unit` (1,) float32: factor of the stored logit gradients."""

    problem: HeadProblem  # its operands have unit stride along H
    logsumexp: Tensor  # (N,) float32
    pairs: Pairs
    unit: Tensor
    row_scale: Tensor  # (N,) float32: largest |dL/d(x·w)| per probability, |c·dz/d(x·w)|

    @property
    def rows(self) -> int:
        return self.problem.hidden.shape[0]

    @property
    def chunk_pairs(self) -> int:
        return self.pairs.config.chunk_pairs(self.rows, self.problem.hidden.element_size())


_EMITTED = {
    **{"entry_columns": "columns", "entry_values": "values", "entries_used": "used"},
    **{"entry_starts": "starts", "entry_counts": "counts", "entry_dropped": "dropped"},
}
"""What the kernel calls the parts of `EntryLists` that it writes."""


def pair_gradient(
    operands: SparseOperands, workspace: Tensor | None, lists: EntryLists | None, chunk: int
) -> None:
    """Fills the workspace with the chunk's logit gradients, and appends their entries to the lists.

    Without a workspace one launch emits the entries of all pairs.

    Args:
        workspace: (`chunk_workspace_pairs`, TILE) in the dtype of hidden.
    """
    problem, pairs, config = operands.problem, operands.pairs, operands.pairs.config
    hidden, weight = problem.hidden, problem.weight
    # A softcap, and rows not known to be aligned, need the registers of half a block.
    aligned = all(size % 16 == 0 for size in (hidden.shape[1], hidden.stride(0), weight.stride(0)))
    whole = aligned and problem.softcap is None
    entries = {name: None if lists is None else getattr(lists, field) for name, field in _EMITTED.items()}
    _pair_gradient[(program_count(hidden.device, config.pair_programs),)](
        **transform_arguments(problem), **entries,
        hidden=hidden, weight=weight, targets=problem.targets, logsumexp=operands.logsumexp,
        target_gradient=pairs.target_gradient, mass_gradient=pairs.mass_gradient, pair_rows=pairs.rows,
        offsets=pairs.offsets, block_offsets=pairs.block_offsets, block_tile=pairs.block_tile,
        chunk_tiles=pairs.chunk_tiles, live_bits=pairs.live_bits, rank_base=pairs.rank_base,
        row_ends=pairs.row_ends, live_count=pairs.live_count, log_threshold=pairs.log_threshold,
        row_scale=operands.row_scale, workspace=workspace, unit=operands.unit,
        rows=operands.rows, vocabulary=weight.shape[0], hidden_size=hidden.shape[1],
        hidden_stride=hidden.stride(0), weight_stride=weight.stride(0), chunk=chunk,
        chunk_pairs=operands.chunk_pairs, entry_capacity=0 if lists is None else lists.columns.numel(),
        TILE=TILE, PRECISION=precision(hidden.dtype), BLOCK=config.pair_rows, PARTS=1 if whole else 2,
        DEPTH=config.pair_depth, EVEN_DEPTH=hidden.shape[1] % config.pair_depth == 0, EMIT_SHARE=EMIT_SHARE,
        num_warps=config.pair_warps, num_stages=config.pair_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "vocabulary", "chunk", "chunk_pairs", "entry_capacity"])
def _pair_gradient(
    hidden,  # (N, H)
    weight,  # (V, H)
    targets,  # (N,) int64
    logsumexp,  # (N,) float32
    target_gradient,  # (N,) float32
    mass_gradient,  # (N,) float32
    bias,  # (V,) or None
    inv_temperature,  # (N,) float32 or None
    logit_scale,
    softcap,
    pair_rows,
    offsets,
    block_offsets,
    block_tile,
    chunk_tiles,
    live_bits,
    rank_base,
    row_ends,
    live_count,
    log_threshold,
    row_scale,
    workspace,  # (chunk_pairs + N, TILE), written, or None
    unit,  # (1,) float32
    entry_columns,  # (entry_capacity,) int32, written, or None with the next five
    entry_values,  # (entry_capacity,) float32
    entries_used,  # (1,) int64
    entry_starts,  # (pairs,) int32 in row-major order, as the next two
    entry_counts,  # (pairs,) int32
    entry_dropped,  # (pairs,) float32: Σ |gradient| of what stays behind
    rows,
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    chunk,
    chunk_pairs,
    entry_capacity,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    EMIT_SHARE: tl.constexpr,
):
    """Logit gradients of the chunk's row blocks; of all where none is stored. Persistent."""
    if workspace is not None:
        first_block = tl.load(block_offsets + tl.load(chunk_tiles + chunk))
        last_block = tl.load(block_offsets + tl.load(chunk_tiles + chunk + 1))
    else:
        first_block = 0
        last_block = tl.load(block_offsets + tl.cdiv(vocabulary, TILE))
    PAIR_ROWS: tl.constexpr = BLOCK // PARTS
    for part in range(first_block * PARTS + tl.program_id(0), last_block * PARTS, tl.num_programs(0)):
        block = part // PARTS
        tile = tl.load(block_tile + block)
        begin = tl.load(offsets + tile) + (block - tl.load(block_offsets + tile)) * BLOCK
        begin += (part % PARTS) * PAIR_ROWS
        pair = begin + tl.arange(0, PAIR_ROWS)
        valid = pair < tl.load(offsets + tile + 1)
        row = tl.load(pair_rows + pair, mask=valid, other=0)
        column = tile * TILE + tl.arange(0, TILE)
        in_vocabulary = column < vocabulary

        products = gathered_products(
            hidden + row.to(tl.int64)[:, None] * hidden_stride,
            # Columns past the end read the last row of the weight; their probability is set to zero below.
            weight + tl.minimum(column, vocabulary - 1).to(tl.int64)[None, :] * weight_stride,
            hidden_size, DEPTH, EVEN_DEPTH, PRECISION,
        )  # fmt: skip
        logits = transform_logits(
            products, bias, inv_temperature, logit_scale, softcap, row, column, rows, vocabulary
        )
        probability = tl.exp(logits - tl.load(logsumexp + row)[:, None])
        probability = tl.where(in_vocabulary[None, :] & valid[:, None], probability, 0.0)
        is_target = (tl.load(targets + row)[:, None] == column[None, :]) & valid[:, None]
        gradient = -tl.load(mass_gradient + row)[:, None] * probability
        gradient = tl.where(is_target, tl.load(target_gradient + row)[:, None], gradient)
        gradient = untransform_gradient(
            gradient, products, bias, inv_temperature, logit_scale, softcap, row, column, rows, vocabulary
        )
        gradient = tl.where(in_vocabulary[None, :], gradient, 0.0)

        if workspace is not None:
            place = pair - (chunk.to(tl.int64) * chunk_pairs - rows)
            stored = (gradient * tl.load(unit)).to(workspace.dtype.element_ty)
            tl.store(
                workspace + place[:, None] * TILE + tl.arange(0, TILE)[None, :], stored, mask=valid[:, None]
            )
        if entry_columns is not None:
            magnitude = tl.where(is_target, 0.0, tl.abs(gradient))
            threshold = tl.exp(tl.load(log_threshold + row)) * tl.load(row_scale + row) * EMIT_SHARE
            below = (magnitude < threshold[:, None]) & ~is_target
            dropped = tl.sum(tl.where(below, magnitude, 0.0), axis=1)
            entries = tl.where(below, 0.0, gradient)  # from here on an entry is what is not zero
            kept = tl.sum((entries != 0.0).to(tl.int32), axis=1)
            start = tl.atomic_add(entries_used, tl.sum(kept).to(tl.int64), sem="relaxed")
            start += tl.cumsum(kept) - kept
            space = tl.minimum(tl.maximum(entry_capacity - start, 0), TILE).to(tl.int32)
            _emit(entries, tile * TILE, start, space, entry_columns, entry_values, SPLITS=2)

            word = (tile // 32).to(tl.int64) * rows + row
            lower = tl.load(live_bits + word) & ((1 << (tile % 32)) - 1)
            in_row = tl.load(row_ends + row) - tl.load(live_count + row)
            in_row += tl.load(rank_base + word) + popcount(lower)
            tl.store(entry_starts + in_row, start.to(tl.int32), mask=valid)
            tl.store(entry_counts + in_row, kept, mask=valid)
            tl.store(entry_dropped + in_row, dropped, mask=valid)


@triton.jit
def _halves(block):
    """Left and right half of the columns."""
    ROWS: tl.constexpr = block.shape[0]
    WIDTH: tl.constexpr = block.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def _emit(entries, first_column, start, space, entry_columns, entry_values, SPLITS: tl.constexpr):
    """Appends what is not zero to each row's run, begun at `start` with room for `space`.

    A scan over all columns at once would spill: the block is halved SPLITS times.
    """
    if SPLITS > 0:
        left, right = _halves(entries)
        _emit(left, first_column, start, space, entry_columns, entry_values, SPLITS - 1)
        used = tl.sum((left != 0.0).to(tl.int32), axis=1)
        first_column += left.shape[1]
        _emit(right, first_column, start + used, space - used, entry_columns, entry_values, SPLITS - 1)
    else:
        keep = (entries != 0.0).to(tl.int32)
        # int32 ranks against one int64 start per row keep the addresses out of the registers.
        rank = tl.cumsum(keep, axis=1) - keep
        fits = (keep != 0) & (rank < space[:, None])
        column = first_column + tl.arange(0, keep.shape[1])[None, :] + tl.zeros_like(keep)
        tl.store((entry_columns + start)[:, None] + rank, column, mask=fits)
        tl.store((entry_values + start)[:, None] + rank, entries, mask=fits)
