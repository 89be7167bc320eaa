"""dX as a row-gathered sparse product: dX_i = Σ over the row's entries of gradient · W[column].

A kept tile of a row has about one column that matters, so dX over single entries reads a hundredth of the
weight's rows. Entries are sampled like pairs (`select`): one of size a ≥ τ_e is kept, a smaller one with
probability a/τ_e, and then as ±τ_e. τ_e is the batch's; it is less in a row whose small entries would exceed
the row's part of the tolerance that the pairs leave. One program per row moves the kept entries to the front
of the row's pairs. Then one program per row holds all of H in registers and adds whole rows of W, without
atomics and in a fixed order: results are bit-equal from run to run.

The pairs' gradients only select the entries. Each entry's gradient is recomputed in float32 from the row of W
that the program has loaded: rounding to half precision would cost dX more than the sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import SEGMENT, TILE
from .hashing import entry_seed, mix, row_seed, spread
from .product import Transform
from .sparse_pairs import SparseOperands, logit_gradient
from .two_heads import divergence_gradient, is_shared


def keep_entries(operands: SparseOperands, gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace each row's gradients by the indices of its kept entries.

    A segment is SEGMENT pairs of a row, whose entries are numbered by 16 bits.

    Args:
        gradients: (capacity, TILE), overwritten: the first elements of a segment hold, as integers of their
            size, the indices of its kept elements in order, always with the target's.

    Returns:
        (N, S) int32 numbers of kept entries; (N, S) float32 thresholds; and (N, S) float32 Σ a·threshold/τ_e²
        of the entries below. Undefined where the pairs did not fit.
    """
    live = operands.live
    count, tiles = live.count.numel(), live.tile_counts.numel()
    segments = triton.cdiv(tiles, SEGMENT)
    kept = live.count.new_empty(count, segments)
    least, small = (live.small.new_empty(count, segments) for _ in range(2))
    if count:
        _keep_entries[(count, segments)](
            gradients, live, operands.pairs, operands.unit, _slots(gradients), kept, least, small,
            TILE=TILE, SEGMENT=SEGMENT, BLOCK=_SCAN, num_warps=4,
        )  # fmt: skip
    return kept, least, small


def hidden_gradient(operands: SparseOperands, slots: Tensor, kept: Tensor, least: Tensor) -> Tensor:
    """Compute (N, H) in the dtype of hidden; undefined where the pairs did not fit.

    Args:
        slots: the gradients as `keep_entries` left them.
        kept: (N, S) int32, kept entries of each segment.
        least: (N, S) float32 thresholds: the size that a smaller kept entry takes.
    """
    call, config = operands.call, operands.config
    hidden, weight = call.hidden, call.weight
    gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    count, depth = hidden.shape
    block, ref_block = triton.next_power_of_2(depth), None
    entry_bytes = block * weight.element_size()
    if operands.divergence is not None:
        other = operands.divergence.pair.reference.weight
        ref_block = triton.next_power_of_2(other.shape[1])
        entry_bytes += 0 if is_shared(operands.divergence.pair) else ref_block * other.element_size()
    # Above 8,192 columns a thread's part of three float32 rows exceeds its registers, and some spill.
    in_flight = min(config.row_bytes // (config.row_entries * entry_bytes), 3)
    most_warps = 16 if torch.version.hip else 32
    if count:
        _hidden_gradient[(2 * count,)](
            transform=Transform.of(call),
            hidden=hidden, weight=weight, live=operands.live, pairs=operands.pairs, least_of=least,
            slots=_slots(slots), kept=kept, segments=kept.shape[1], gradient=gradient, rows=count,
            vocabulary=weight.shape[0], depth=depth, hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0), TILE=TILE, SEGMENT=SEGMENT, BLOCK=block,
            REF_BLOCK=ref_block, ENTRIES=config.row_entries, STAGES=in_flight + 1, LONG=_LONG,
            num_warps=min(max(max(block, ref_block or 0) // config.row_width, 1), most_warps),
            **operands.reference_arguments(),
        )  # fmt: skip
    return gradient


def _slots(gradients: Tensor) -> Tensor:
    """View the gradients' memory as integers."""
    return gradients.view(torch.int16 if gradients.element_size() == 2 else torch.int32)


_SCAN = 1024  # elements of a row's gradients at a time
_LONG = 256  # rows with more kept entries run first


@triton.jit
def _keep_entries(
    gradients,  # (capacity, TILE)
    live,  # `ActivePairs`
    pairs,  # `Pairs`
    unit,  # (1,) float32 or None
    slots,  # the gradients as integers, written
    kept_out,  # (N, S) int32, written
    least_out,  # (N, S) float32, written
    small_out,  # (N, S) float32, written
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One segment of a row."""
    row, segment, masses = tl.program_id(0), tl.program_id(1), live.masses
    count = tl.where(tl.load(pairs.fits) != 0, tl.load(live.count + row), 0)
    elements = tl.minimum(tl.maximum(count - segment * SEGMENT, 0), SEGMENT) * TILE
    first = tl.load(live.row_ends + row) - tl.load(live.room + row) + segment * SEGMENT
    target, vocabulary = tl.load(masses.targets + row), masses.vocabulary
    usual = tl.load(live.threshold.numbers + 1)
    pairs_of_all = tl.load(live.row_ends + tl.num_programs(0) - 1)
    most = tl.load(live.threshold.numbers + 3) * (elements // TILE).to(tl.float32) / pairs_of_all
    stored = usual if unit is None else usual * tl.load(unit)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, elements, BLOCK):
        size, column, present = _sizes(gradients, pairs, first, start, elements, vocabulary, TILE, BLOCK)
        sums += tl.where(present & (size < stored) & (column != target), size, 0.0)
    sizes = tl.sum(sums)
    share = tl.where(sizes > most * stored, most * stored / sizes, 1.0)
    least = stored * share
    seed = entry_seed(row_seed(tl.load(masses.logsumexp + row), row, live.threshold.salt))
    kept = 0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, elements, BLOCK):
        size, column, present = _sizes(gradients, pairs, first, start, elements, vocabulary, TILE, BLOCK)
        small = present & (size < least) & (column != target)  # NaN is not
        drawn = (mix(seed + spread(column)) >> 8).to(tl.float32) * least < size * 16777216.0
        total += tl.where(small, size, 0.0)
        keep = (present & (~small | drawn)).to(tl.int32)
        rank = kept + tl.cumsum(keep, axis=0) - keep
        tl.debug_barrier()  # other threads have read what is overwritten
        element = (start + tl.arange(0, BLOCK)).to(slots.dtype.element_ty)
        tl.store(slots + first * TILE + rank, element, mask=keep != 0)
        kept += tl.sum(keep)
    at = row * tl.num_programs(1) + segment
    tl.store(kept_out + at, kept)
    tl.store(least_out + at, usual * share)
    sizes = tl.sum(total)
    tl.store(small_out + at, tl.where(sizes > 0.0, sizes / stored * share, 0.0))


@triton.jit
def _sizes(gradients, pairs, first, start, elements, vocabulary, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return |gradient|, column and presence of BLOCK elements of a segment."""
    element = start + tl.arange(0, BLOCK)
    present = element < elements
    size = tl.abs(tl.load(gradients + first * TILE + element, mask=present, other=0.0).to(tl.float32))
    column = tl.load(pairs.tiles + first + element // TILE, mask=present, other=0) * TILE + element % TILE
    return size, column, present & (column < vocabulary)


@triton.jit(do_not_specialize=["rows", "segments", "vocabulary"])
def _hidden_gradient(
    hidden,  # (N, H)
    weight,  # (V, H)
    live,  # `ActivePairs`
    pairs,  # `Pairs`
    transform,  # `Transform`
    least_of,  # (N, segments) float32
    slots,
    kept,  # (N, segments) int32
    segments,
    gradient,  # (N, H), written
    reference,  # `Head` or None, as the next
    of_rows,  # `DivergenceRows`
    beta,
    rows,
    vocabulary,
    depth,
    hidden_stride,
    weight_stride,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    REF_BLOCK: tl.constexpr,
    DIRECTION: tl.constexpr,
    SHARED: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
    LONG: tl.constexpr,
):
    """Compute one row of dX. The first N programs take the long rows, which would finish last."""
    row, masses = tl.program_id(0) % rows, live.masses
    count = 0
    for segment in range(segments):
        count += tl.load(kept + row * segments + segment)
    if (tl.load(pairs.fits) == 0) | ((count > LONG) != (tl.program_id(0) < rows)):
        return
    h = tl.arange(0, BLOCK)
    inside = h < depth
    x = tl.load(hidden + row.to(tl.int64) * hidden_stride + h, mask=inside & (count > 0), other=0.0)
    x = x.to(tl.float32)[None, :]
    this = row + tl.arange(0, 1)
    if reference is not None:
        ref_h = tl.arange(0, REF_BLOCK)
        ref_inside = ref_h < reference.hidden_size
        ref_x = reference.hidden + row.to(tl.int64) * reference.hidden_stride + ref_h
        ref_x = tl.load(ref_x, mask=ref_inside & (count > 0), other=0.0).to(tl.float32)[None, :]
    lse, mass = tl.load(masses.logsumexp + this), tl.load(masses.mass + this)
    of_target, target = tl.load(masses.target + this), tl.load(masses.targets + this)
    total = tl.zeros((ENTRIES, BLOCK), dtype=tl.float32)
    first = tl.load(live.row_ends + row) - tl.load(live.room + row)
    for segment in range(segments):
        here = tl.load(kept + row * segments + segment)
        least = tl.load(least_of + row * segments + segment)
        for start in tl.range(0, here, ENTRIES, num_stages=STAGES):
            entry = start + tl.arange(0, ENTRIES)
            present = entry < (here if ENTRIES > 1 else start + 1)
            slot = tl.load(slots + first * TILE + entry, mask=present, other=0).to(tl.int32) & 0xFFFF
            tile = tl.load(pairs.tiles + first + slot // TILE, mask=present, other=0)
            scale = tl.load(pairs.scales + first + slot // TILE, mask=present, other=0.0)
            column = tile * TILE + slot % TILE
            w = weight + column.to(tl.int64)[:, None] * weight_stride + h[None, :]
            w = tl.load(w, mask=present[:, None] & inside[None, :], other=0.0).to(tl.float32)
            product = tl.sum(w * x, axis=1)[None, :]
            if reference is None:
                uncertain, e = None, None
                if masses.entropy_gradient is not None:
                    uncertain, e = tl.load(masses.entropy + this), tl.load(masses.entropy_gradient + this)
                value = logit_gradient(
                    product, transform, lse, mass, of_target, uncertain, e, target, this, column, rows,
                    vocabulary,
                )  # fmt: skip
            else:
                ref_w = w
                if not SHARED:
                    at = column.to(tl.int64)[:, None] * reference.weight_stride + ref_h[None, :]
                    ref_w = tl.load(
                        reference.weight + at, mask=present[:, None] & ref_inside[None, :], other=0.0
                    ).to(tl.float32)
                value = divergence_gradient(
                    product, tl.sum(ref_w * ref_x, axis=1)[None, :], transform, reference.transform, of_rows,
                    beta, this, column, rows, vocabulary, DIRECTION,
                )  # fmt: skip
            value = scale * tl.reshape(value, (ENTRIES,))
            counted = tl.where(value < 0.0, -least, least)
            small = (tl.abs(value) < least) & (column != tl.sum(target))
            total += tl.where(present, tl.where(small, counted, value), 0.0)[:, None] * w
        first += SEGMENT
    place = gradient + row.to(tl.int64) * depth + h
    tl.store(place, tl.sum(total, axis=0).to(gradient.dtype.element_ty), mask=inside)
