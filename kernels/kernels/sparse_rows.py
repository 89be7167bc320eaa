"""dX as a row-gathered sparse product: dX_i = Σ over the row's entries of value · W[column].

One program per row holds all of H in registers and adds whole rows of W to it: no atomics, one store, and the
entries in a fixed order (by vocabulary tile, then column), so results are bit-equal from run to run.
Measured on an H200 with a prototype of it: 0.9 ms for 40 entries a row at N = 16,384 and H = 2048, against
2.5 ms for adding pair tiles up with float32 atomics; splitting H over programs was 3 to 8 times slower. Only
rows with many times the entries of a median one are split, which would run on when all others have finished:
each slice of H is a program's, with as many bytes in flight as a short row has.

The pair gradient leaves a row's entries scattered: a run per pair, in the order in which programs finished.
`_gather_entries` brings them together through the pairs' row-major table; `_entry_curve` sums what each
threshold would leave out of them, and `balance` sets the threshold that spends what the pairs left of the
tolerance. `_keep_entries` drops what is below it: the product waits for no entry that does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LEVELS, cuda
from .balance import Balance, balance, log_levels
from .product import program_count
from .select import Pairs

if TYPE_CHECKING:
    from .sparse_pairs import SparseOperands


@dataclass(frozen=True)
class EntryLists:
    """The entries of the logit gradient that count for dX: as emitted, and gathered by row."""

    columns: Tensor  # (capacity,) int32: vocabulary entry
    values: Tensor  # (capacity,) float32: dL/d(x·w)
    used: Tensor  # (3,) int64: entries emitted, entries gathered, long rows
    starts: Tensor  # (pairs,) int32: first entry of each pair, pairs in row-major order
    counts: Tensor  # (pairs,) int32
    dropped: Tensor  # (pairs,) float32: Σ |gradient| of what was not emitted
    row_columns: Tensor  # (capacity,) int32; in the end each row's kept entries come first
    row_values: Tensor  # (capacity,) float32
    row_starts: Tensor  # (N,) int64
    row_counts: Tensor  # (N,) int32
    row_dropped: Tensor  # (N,) float32
    kept_counts: Tensor  # (N,) int32: entries that are kept
    long_rows: Tensor  # (N,) int32: rows with more than `LONG_ROW` of them, in no order

    @classmethod
    def allocate(cls, pairs: Pairs, rows: int) -> EntryLists:
        capacity, table = pairs.config.entry_capacity(rows), pairs.rows.numel()
        int32, int64, float32 = torch.int32, torch.int64, torch.float32

        def empty(size: int, *dtypes: torch.dtype) -> list[Tensor]:
            return [torch.empty(size, dtype=dtype, device=pairs.rows.device) for dtype in dtypes]

        used = torch.zeros(3, dtype=int64, device=pairs.rows.device)
        emitted = *empty(capacity, int32, float32), used, *empty(table, int32, int32, float32)
        gathered = empty(capacity, int32, float32) + empty(rows, int64, int32, float32, int32, int32)
        return cls(*emitted, *gathered)

    def overflow(self) -> Tensor:
        """(1,) int32: set when more entries were found than fit; then dX means nothing."""
        return (self.used[:1] > self.columns.numel()).int()


def hidden_gradient(operands: SparseOperands, lists: EntryLists) -> tuple[Tensor, Balance]:
    """(N, H) in the dtype of hidden, and what each row leaves out; without meaning when pairs or entries
    overflowed.
    """
    hidden, weight, targets = operands.problem[:3]
    pairs, row_scale = operands.pairs, operands.row_scale
    rows, depth = hidden.shape
    curve = torch.empty((LEVELS, rows), dtype=torch.float32, device=hidden.device)
    levels = log_levels(hidden.device)
    config, capacity = pairs.config, lists.columns.numel()
    gathered = lists.row_columns, lists.row_values, lists.row_starts, lists.row_counts
    lists.used[1:].zero_()
    if rows:
        _gather_entries[(rows,)](
            lists.columns, lists.values, lists.used, lists.starts, lists.counts, lists.dropped,
            pairs.row_ends, pairs.live_count, pairs.overflow, *gathered, lists.row_dropped, capacity,
            BLOCK=64, RUN=8, num_warps=4,
        )  # fmt: skip
        _entry_curve[(rows,)](
            *gathered, lists.row_dropped, pairs.left_out, targets, row_scale, levels, curve, rows,
            LEVELS=LEVELS, BLOCK_LEVELS=triton.next_power_of_2(LEVELS), BLOCK=128, num_warps=4,
        )  # fmt: skip
    balanced = balance(curve, levels, pairs.mass_gradient, pairs.budget(1.0))
    if config.cuda_rows:
        gradient = cuda.hidden_gradient(
            weight, *gathered, targets, row_scale, balanced.log_threshold, lists.used, pairs.overflow
        )
        return gradient, balanced
    gradient = torch.empty((rows, depth), dtype=hidden.dtype, device=hidden.device)
    if rows:
        _keep_entries[(rows,)](
            *gathered, targets, row_scale, balanced.log_threshold,
            lists.kept_counts, lists.long_rows, lists.used, LONG_ROW=LONG_ROW, BLOCK=256, num_warps=4,
        )  # fmt: skip
        kept = *gathered[:3], lists.kept_counts
        _hidden_gradient[(rows,)](
            weight, *kept, gradient, depth, weight.stride(0), LONG_ROW=LONG_ROW,
            BLOCK=triton.next_power_of_2(depth), ENTRIES=config.row_entries, num_warps=config.row_warps,
        )  # fmt: skip
        _hidden_gradient_of_long_rows[(program_count(hidden.device, 3),)](
            weight, *kept, lists.long_rows, lists.used, gradient, depth, weight.stride(0),
            BLOCK=_SLICE, ENTRIES=_SLICE_ENTRIES, num_warps=8,
        )  # fmt: skip
    return gradient, balanced


LONG_ROW = 256
"""Kept entries above which a row is split over programs."""

_SLICE = 512  # columns of H
_SLICE_ENTRIES = 16


@triton.jit
def popcount(bits):
    """Set bits of every int32."""
    value = bits.to(tl.uint32, bitcast=True)
    value = value - ((value >> 1) & 0x55555555)
    value = (value & 0x33333333) + ((value >> 2) & 0x33333333)
    value = (value + (value >> 4)) & 0x0F0F0F0F
    value = value + (value >> 8)
    return ((value + (value >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["capacity"])
def _gather_entries(
    columns,
    values,
    used,  # (2,) int64
    starts,
    counts,
    dropped,
    row_ends,
    live_count,
    overflow,
    row_columns,
    row_values,
    row_starts,
    row_counts,
    row_dropped,
    capacity,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """Copies one row's entries next to each other, pairs in ascending tiles."""
    row = tl.program_id(0)
    pairs = tl.load(live_count + row)
    if (tl.load(overflow) != 0) | (tl.load(used) > capacity):
        pairs = 0
    first = tl.load(row_ends + row) - pairs
    lane = tl.arange(0, BLOCK)
    total = 0
    left = 0.0
    for start in range(0, pairs, BLOCK):
        inside = start + lane < pairs
        total += tl.sum(tl.load(counts + first + start + lane, mask=inside, other=0))
        left += tl.sum(tl.load(dropped + first + start + lane, mask=inside, other=0.0))
    place = tl.atomic_add(used + 1, total.to(tl.int64), sem="relaxed")
    tl.store(row_starts + row, place)
    tl.store(row_counts + row, total)
    tl.store(row_dropped + row, left)
    for start in range(0, pairs, BLOCK):
        inside = start + lane < pairs
        count = tl.load(counts + first + start + lane, mask=inside, other=0)
        source = tl.load(starts + first + start + lane, mask=inside, other=0)
        target = place + tl.cumsum(count) - count
        for first_entry in range(0, tl.max(count), RUN):
            entry = first_entry + tl.arange(0, RUN)[None, :]
            present = entry < count[:, None]
            column = tl.load(columns + source[:, None] + entry, mask=present)
            value = tl.load(values + source[:, None] + entry, mask=present)
            tl.store(row_columns + target[:, None] + entry, column, mask=present)
            tl.store(row_values + target[:, None] + entry, value, mask=present)
        place += tl.sum(count)


@triton.jit
def _probability(values, scale):
    """What an entry counts as; nothing where the row's gradient is only the target's."""
    return tl.where(scale == 0.0, 0.0, tl.abs(values) / scale)


@triton.jit(do_not_specialize=["rows"])
def _entry_curve(
    row_columns,
    row_values,
    row_starts,
    row_counts,
    row_dropped,
    left_out,  # (N,) float32: by the pairs
    targets,  # (N,) int64
    row_scale,  # (N,) float32
    levels,  # (LEVELS,) float32
    curve,  # (LEVELS, N) float32, written
    rows,
    LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What one row leaves out at each threshold: what it has left out so far, and its entries below."""
    row = tl.program_id(0)
    first, count = tl.load(row_starts + row), tl.load(row_counts + row)
    scale, target = tl.load(row_scale + row), tl.load(targets + row)
    level = tl.arange(0, BLOCK_LEVELS)
    threshold = tl.exp(tl.load(levels + level, mask=level < LEVELS, other=float("-inf")))
    below = tl.zeros((BLOCK, BLOCK_LEVELS), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        present = entry < count
        share = _probability(tl.load(row_values + first + entry, mask=present, other=0.0), scale)
        is_target = tl.load(row_columns + first + entry, mask=present, other=0) == target
        share = tl.where(is_target, 0.0, share)
        below += tl.where(share[:, None] < threshold[None, :], share[:, None], 0.0)
    so_far = tl.load(left_out + row) + _probability(tl.load(row_dropped + row), scale)
    place = curve + level.to(tl.int64) * rows + row
    tl.store(place, so_far + tl.sum(below, axis=0), mask=level < LEVELS)


@triton.jit
def _keep_entries(
    row_columns,
    row_values,
    row_starts,
    row_counts,
    targets,  # (N,) int64
    row_scale,  # (N,) float32
    log_threshold,  # (N,) float32
    kept_counts,  # (N,) int32, written
    long_rows,  # (N,) int32, written
    used,  # (3,) int64
    LONG_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves one row's entries at or above its threshold, and the target's, to its front, in their order."""
    row = tl.program_id(0)
    first, count = tl.load(row_starts + row), tl.load(row_counts + row)
    threshold, scale = tl.exp(tl.load(log_threshold + row)), tl.load(row_scale + row)
    target = tl.load(targets + row)
    kept = 0
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        present = entry < count
        column = tl.load(row_columns + first + entry, mask=present, other=0)
        value = tl.load(row_values + first + entry, mask=present, other=0.0)
        # Written so that NaN is kept.
        keep = present & ((column == target) | ~(_probability(value, scale) < threshold))
        rank = tl.cumsum(keep.to(tl.int32)) - keep.to(tl.int32)
        tl.debug_barrier()  # what is overwritten has been read, by other threads too
        tl.store(row_columns + first + kept + rank, column, mask=keep)
        tl.store(row_values + first + kept + rank, value, mask=keep)
        kept += tl.sum(keep.to(tl.int32))
    tl.store(kept_counts + row, kept)
    is_long = kept > LONG_ROW
    if is_long:
        tl.store(long_rows + tl.atomic_add(used + 2, is_long.to(tl.int64), sem="relaxed"), row)


@triton.jit
def _write_row(
    row, column, count, weight, columns, values, starts, gradient, depth, weight_stride, ENTRIES: tl.constexpr
):
    """Σ value · W[token] over a row's entries, at these columns of H; ENTRIES rows of W are in flight."""
    total = tl.zeros((ENTRIES, column.shape[0]), dtype=tl.float32)
    inside = column < depth
    first = tl.load(starts + row)
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        present = entry < count
        token = tl.load(columns + first + entry, mask=present, other=0).to(tl.int64)
        value = tl.load(values + first + entry, mask=present, other=0.0)
        w = tl.load(
            weight + token[:, None] * weight_stride + column[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        total += value[:, None] * w.to(tl.float32)
    place = gradient + row.to(tl.int64) * depth + column
    tl.store(place, tl.sum(total, axis=0).to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _hidden_gradient(
    weight,  # (V, H)
    columns,
    values,
    starts,
    counts,
    gradient,  # (N, H), written but for long rows
    depth,
    weight_stride,
    LONG_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One row of dX, all of H."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    count = tl.load(counts + row)
    if count <= LONG_ROW:
        _write_row(
            row, column, count, weight, columns, values, starts, gradient, depth, weight_stride, ENTRIES
        )


@triton.jit
def _hidden_gradient_of_long_rows(
    weight,  # (V, H)
    columns,
    values,
    starts,
    counts,
    long_rows,
    used,
    gradient,  # (N, H), long rows written
    depth,
    weight_stride,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """BLOCK columns of H of a long row at a time. Persistent."""
    slices = tl.cdiv(depth, BLOCK)
    for item in range(tl.program_id(0), tl.load(used + 2).to(tl.int32) * slices, tl.num_programs(0)):
        row = tl.load(long_rows + item // slices)
        column, count = (item % slices) * BLOCK + tl.arange(0, BLOCK), tl.load(counts + row)
        _write_row(
            row, column, count, weight, columns, values, starts, gradient, depth, weight_stride, ENTRIES
        )
