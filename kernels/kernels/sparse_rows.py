"""dX as a row-gathered sparse product: dX_i = Σ over the row's entries of gradient · W[column].

A live tile of a row holds about one column that matters, so dX over single entries reads a hundredth of what
dX over pairs would. A row's pairs lie next to each other: one program counts what each threshold would leave
out of them, `balance` sets the threshold that spends what the pairs left of the tolerance, and the entries
at or above it are brought to the front. Then one program per row holds all of H in registers and adds whole
rows of W: no atomics, one store, and the entries in a fixed order, so results are bit-equal from run to run.

The gradients of the pairs only say which entries count. Each entry's own is formed anew in float32, from
the row of W that the program holds anyway: rounding to half precision would cost dX more than the tolerance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BF16_ROUNDING, LEVELS, TILE
from .balance import balance, count_octaves, level_of, store_curve, threshold_of
from .product import transform_arguments
from .sparse_pairs import SparseOperands, logit_gradient


def keep_entries(operands: SparseOperands, gradients: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Brings each row's entries that count to its front, in their order, in place of its gradients.

    Args:
        gradients: (capacity, TILE), overwritten: the first of a row's elements hold, as integers of their
            size, which of its elements were kept; the target's always is.

    Returns:
        (N,) int32 kept entries, and (N,) float32 the probability that a row leaves out in all. Without
        meaning where the pairs did not fit.
    """
    rows, live, pairs = operands.rows, operands.live, operands.pairs
    count = live.count.numel()
    curve = rows.mass.new_empty((count, LEVELS))
    kept, left_out = live.count.new_empty(count), rows.mass.new_empty(count)
    scale = rows.scale if operands.unit is None else rows.scale * operands.unit
    half = gradients.element_size() == 2
    rounded = 1 + BF16_ROUNDING if half else 1.0  # by which a stored gradient can be less than its entry
    inputs = (
        gradients, pairs.tiles, live.row_ends, live.count, pairs.fits, live.left_out,
        operands.problem.targets, scale, operands.problem.vocabulary,
    )  # fmt: skip
    if count:
        _entry_curve[(count,)](*inputs, curve, TILE=TILE, BLOCK=_SCAN, ROUNDED=rounded, num_warps=4)
    kappa = balance(curve, rows.mass, rows.squares, tolerance * BF16_ROUNDING)
    if count:
        slots = gradients.view(torch.int16 if half else torch.int32)
        _keep_entries[(count,)](
            *inputs, rows.mass, curve, kappa, slots, kept, left_out,
            TILE=TILE, BLOCK=_SCAN, ROUNDED=rounded, num_warps=4,
        )  # fmt: skip
    return kept, left_out


def hidden_gradient(operands: SparseOperands, slots: Tensor, kept: Tensor) -> Tensor:
    """(N, H) in the dtype of hidden; without meaning where the pairs did not fit.

    Args:
        slots: what `keep_entries` left of the gradients.
        kept: (N,) int32, how many a row has.
    """
    problem, config = operands.problem, operands.config
    rows, live, pairs = operands.rows, operands.live, operands.pairs
    hidden, weight = problem.hidden, problem.weight
    gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    count, depth = hidden.shape
    block = triton.next_power_of_2(depth)
    if count:
        _hidden_gradient[(2 * count,)](
            **transform_arguments(problem),
            hidden=hidden, weight=weight, targets=problem.targets, logsumexp=rows.logsumexp,
            mass_gradient=rows.mass, target_gradient=rows.target,
            slots=slots.view(torch.int16 if slots.element_size() == 2 else torch.int32), kept=kept,
            pair_tiles=pairs.tiles, row_ends=live.row_ends, live_count=live.count, fits=pairs.fits,
            gradient=gradient, rows=count, vocabulary=weight.shape[0], depth=depth,
            hidden_stride=hidden.stride(0), weight_stride=weight.stride(0),
            TILE=TILE, BLOCK=block, ENTRIES=config.row_entries, STAGES=config.row_stages, LONG=_LONG,
            num_warps=min(max(block // config.row_width, 1), 16),
        )  # fmt: skip
    return gradient


_SCAN = 1024  # elements of a row's gradients at a time
_LONG = 256  # kept entries above which a row goes before the others


@triton.jit
def _row_shares(
    gradients,  # (capacity, TILE)
    pair_tiles,  # (capacity,) int32, by place
    first,  # int64: the row's first pair
    start,
    elements,
    target,
    scale,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The probability that BLOCK elements of a row count as, which are there, which is the target."""
    element = start + tl.arange(0, BLOCK)
    present = element < elements
    value = tl.load(gradients + first * TILE + element, mask=present, other=0.0).to(tl.float32)
    column = tl.load(pair_tiles + first + element // TILE, mask=present, other=0) * TILE + element % TILE
    share = tl.where(scale == 0.0, 0.0, tl.abs(value) / scale)  # only the target's gradient
    present &= column < vocabulary
    return share, present, present & (column == target)


@triton.jit(do_not_specialize=["vocabulary"])
def _entry_curve(
    gradients,
    pair_tiles,
    row_ends,
    live_count,
    fits,
    left_out,  # (N,) float32: by the pairs
    targets,  # (N,) int64
    row_scale,  # (N,) float32
    vocabulary,
    curve,  # (N, LEVELS) float32, written
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """At least what one row leaves out at each threshold: with its pairs, and with its entries below."""
    row = tl.program_id(0)
    pairs = tl.where(tl.load(fits) != 0, tl.load(live_count + row), 0)
    first = tl.load(row_ends + row) - pairs
    target, scale = tl.load(targets + row), tl.load(row_scale + row)
    share, present, is_target = _row_shares(
        gradients, pair_tiles, first, 0, pairs * TILE, target, scale, vocabulary, TILE, BLOCK
    )
    counts = count_octaves(tl.log2(share), present & ~is_target)
    for start in range(BLOCK, pairs * TILE, BLOCK):
        share, present, is_target = _row_shares(
            gradients, pair_tiles, first, start, pairs * TILE, target, scale, vocabulary, TILE, BLOCK
        )
        counts += count_octaves(tl.log2(share), present & ~is_target)
    store_curve(curve, row, counts, tl.load(left_out + row), FACTOR=ROUNDED)


@triton.jit(do_not_specialize=["vocabulary"])
def _keep_entries(
    gradients,
    pair_tiles,
    row_ends,
    live_count,
    fits,
    left_out,
    targets,
    row_scale,
    vocabulary,
    mass_gradient,  # (N,) float32
    curve,
    kappa,  # (1,) float32
    slots,  # the gradients as integers, written
    kept_out,  # (N,) int32, written
    left_out_all,  # (N,) float32, written
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """One row: what is kept goes to its front as numbers of its elements."""
    row = tl.program_id(0)
    pairs = tl.where(tl.load(fits) != 0, tl.load(live_count + row), 0)
    first = tl.load(row_ends + row) - pairs
    target, scale = tl.load(targets + row), tl.load(row_scale + row)
    threshold = threshold_of(level_of(curve, row, tl.load(mass_gradient + row), tl.load(kappa)))
    kept = 0
    dropped = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, pairs * TILE, BLOCK):
        share, present, is_target = _row_shares(
            gradients, pair_tiles, first, start, pairs * TILE, target, scale, vocabulary, TILE, BLOCK
        )
        below = (share < threshold) & ~is_target  # NaN is not
        dropped += tl.where(present & below, share, 0.0)
        keep = (present & ~below).to(tl.int32)
        rank = kept + tl.cumsum(keep, axis=0) - keep
        tl.debug_barrier()  # what is overwritten has been read, by other threads too
        element = (start + tl.arange(0, BLOCK)).to(slots.dtype.element_ty)
        tl.store(slots + first * TILE + rank, element, mask=keep != 0)
        kept += tl.sum(keep)
    tl.store(kept_out + row, kept)
    tl.store(left_out_all + row, tl.load(left_out + row) + ROUNDED * tl.sum(dropped))


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def _hidden_gradient(
    hidden,  # (N, H)
    weight,  # (V, H)
    targets,  # (N,) int64
    logsumexp,  # (N,) float32
    mass_gradient,  # (N,) float32
    target_gradient,  # (N,) float32
    bias,  # (V,) or None
    inv_temperature,  # (N,) float32 or None
    logit_scale,
    softcap,
    slots,
    kept,
    pair_tiles,
    row_ends,
    live_count,
    fits,
    gradient,  # (N, H), written
    rows,
    vocabulary,
    depth,
    hidden_stride,
    weight_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """One row of dX, all of H. The first N programs take the long rows, which would run on at the end."""
    row = tl.program_id(0) % rows
    count = tl.load(kept + row)
    if (tl.load(fits) == 0) | ((count > LONG) != (tl.program_id(0) < rows)):
        return
    h = tl.arange(0, BLOCK)
    inside = h < depth
    x = tl.load(hidden + row.to(tl.int64) * hidden_stride + h, mask=inside & (count > 0), other=0.0)
    x = x.to(tl.float32)[None, :]
    first = tl.load(row_ends + row) - tl.load(live_count + row)
    this = row + tl.arange(0, 1)
    lse, mass = tl.load(logsumexp + this), tl.load(mass_gradient + this)
    of_target, target = tl.load(target_gradient + this), tl.load(targets + this)
    total = tl.zeros((ENTRIES, BLOCK), dtype=tl.float32)
    for start in tl.range(0, count, ENTRIES, num_stages=STAGES):
        entry = start + tl.arange(0, ENTRIES)
        present = entry < (count if ENTRIES > 1 else start + 1)
        slot = tl.load(slots + first * TILE + entry, mask=present, other=0).to(tl.int32) & 0xFFFF
        tile = tl.load(pair_tiles + first + slot // TILE, mask=present, other=0)
        column = tile * TILE + slot % TILE
        w = weight + column.to(tl.int64)[:, None] * weight_stride + h[None, :]
        w = tl.load(w, mask=present[:, None] & inside[None, :], other=0.0).to(tl.float32)
        value = logit_gradient(
            tl.sum(w * x, axis=1)[None, :], bias, inv_temperature, logit_scale, softcap, lse, mass, of_target,
            target, this, column, rows, vocabulary,
        )  # fmt: skip
        total += tl.where(present, tl.reshape(value, (ENTRIES,)), 0.0)[:, None] * w
    place = gradient + row.to(tl.int64) * depth + h
    tl.store(place, tl.sum(total, axis=0).to(gradient.dtype.element_ty), mask=inside)
