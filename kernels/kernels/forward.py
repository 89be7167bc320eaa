"""The forward: X Wᵀ whose float32 logits never leave registers, reduced to a few numbers per (row, mass
tile).

Rows with work are gathered to the front, so that the others cost nothing; persistent programs write the
log-sum-exp of every mass tile and what optional statistics need, back in the rows' own order; a small kernel
folds the tiles into per-row results. A program's tile is several mass tiles wide, so that the product runs
at full speed while the tile masses stay fine. An optional statistic whose output is None is not in the
machine code.

Statistics per mass tile are relative to the tile, so that nothing cancels when the logits are large: with
P_k = exp(tile_lse_k - lse), the row's entropy is Σ_k P_k (entropy_k + lse - tile_lse_k).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import TILE, ProductTile
from .dense import row_aligned
from .product import (
    LOG2E,
    product_arguments,
    program_count,
    tile_position,
    tile_products,
    transform_arguments,
    transform_logits,
)

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem


class Gathered(NamedTuple):
    """The rows with work, in their order, before undefined ones; and the logits of their targets."""

    hidden: Tensor  # (N, H)
    inv_temperature: Tensor | None  # (N,) float32
    order: Tensor  # (N,) int64: the row that was gathered here
    count: Tensor  # (1,) int32: rows with work
    target_logit: Tensor  # (N,) float32 in the rows' own order; zero where the target is in no row of W


class TileStatistics(NamedTuple):
    """Per row and mass tile, float32, T = ceil(V / TILE); None where not wanted.

    Rows begin on 64 bytes, and are undefined without work.
    """

    lse: Tensor  # (N, T) log-sum-exp of the tile's logits
    entropy: Tensor | None  # (N, T) of the distribution within the tile
    total: Tensor | None  # (N, T) sum of the tile's logits
    maximum: Tensor | None  # (N, T)
    squares: Tensor | None  # (N, T) log Σ (p within the tile)²


# `vocabulary` is specialised: where it may be no multiple of 16, what is kept is stored two bytes at a time.
@triton.jit(do_not_specialize=["programs"])
def forward_kernel(
    hidden,  # (N, H): see tile_products; rows in the order of the work, as inv_temperature
    weight,  # (V, H)
    bias,  # (V,)
    inv_temperature,  # (N,) float32
    targets,  # (N,) int64
    order,  # (N,) int64: where a row's results go
    count,  # (1,) int32: rows in use
    lse_out,  # (N, T) float32
    target_out,  # (N,) float32 or None: the logit that equals the maximum where the target is the likeliest
    entropy_out,  # (N, T) float32 or None, as the next three
    total_out,
    maximum_out,
    squares_out,
    kept_out,  # (N, V) or None: exp(z - reference)
    reference,  # (N,) float32
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    tile_stride,
    kept_stride,
    logit_scale,
    softcap,
    programs,
    EVEN_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HALVES: tl.constexpr = COLUMNS // TILE
    tl.assume(hidden_size > 0)
    rows = tl.load(count)
    row_blocks = tl.cdiv(rows, ROWS)
    column_blocks = tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, programs, flatten=DESCRIPTORS):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        first_row = row_block * ROWS
        first_column = column_block * COLUMNS
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        z = tile_products(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, rows, vocabulary,
            hidden_size, ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_DEPTH, PRECISION,
        )  # fmt: skip
        z = transform_logits(z, bias, inv_temperature, logit_scale, softcap, row, column, rows, vocabulary)
        live = row < rows
        to = tl.load(order + row, mask=live, other=0)

        # Positions relative to the tile, in 32 bits: compared with constants, they take no registers.
        offset = tl.arange(0, COLUMNS)
        inside = offset < vocabulary - first_column
        if target_out is not None:
            target = (tl.load(targets + to, mask=live, other=-1) - first_column).to(tl.int32)
            target_logit = tl.sum(tl.where(offset[None, :] == target[:, None], z, 0.0), axis=1)
            here = (target >= 0) & (target < tl.minimum(COLUMNS, vocabulary - first_column))
            tl.store(target_out + to, target_logit, mask=live & here)

        mass_tile = column_block * HALVES + tl.arange(0, HALVES)
        at = to[:, None] * tile_stride + mass_tile[None, :]
        kept = live[:, None] & (mass_tile * TILE < vocabulary)[None, :]
        if total_out is not None:
            counted = z if EVEN_COLUMNS else tl.where(inside[None, :], z, 0.0)
            tl.store(total_out + at, tl.sum(tl.reshape(counted, (ROWS, HALVES, TILE)), axis=2), mask=kept)
        if not EVEN_COLUMNS:
            z = tl.where(inside[None, :], z, float("-inf"))

        z = tl.reshape(z, (ROWS, HALVES, TILE))
        maximum = tl.max(z, axis=2)
        if maximum_out is not None:
            tl.store(maximum_out + at, maximum, mask=kept)
        base = tl.where(maximum == float("-inf"), 0.0, maximum)
        behind = tl.fma(z, LOG2E, (-base * LOG2E)[:, :, None])  # the largest logit, in octaves
        e = tl.exp2(behind)
        mass = tl.sum(e, axis=2)
        log_mass = tl.log(mass)
        tl.store(lse_out + at, base + log_mass, mask=kept)
        if kept_out is not None:
            line = kept_out + to * kept_stride
            above = base - tl.load(reference + to, mask=live, other=0.0)[:, None]
            kept_e = tl.reshape(e * tl.exp2(above * LOG2E)[:, :, None], (ROWS, COLUMNS))
            kept_e = kept_e.to(kept_out.dtype.element_ty)
            tl.store(line[:, None] + column[None, :], kept_e, mask=live[:, None] & inside[None, :])
        if entropy_out is not None:
            surprise = tl.sum(e * tl.maximum(behind, -1000.0), axis=2) / LOG2E  # 0·-inf is none
            tl.store(entropy_out + at, tl.where(mass > 0, log_mass - surprise / mass, 0.0), mask=kept)
        if squares_out is not None:
            squares = tl.log(tl.sum(e * e, axis=2)) - 2.0 * log_mass
            tl.store(squares_out + at, tl.where(mass > 0, squares, 0.0), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def order_kernel(targets, order, count, rows, BLOCK: tl.constexpr):
    """One program: the rows with work, in ascending order, and how many."""
    found = tl.zeros((1,), dtype=tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        works = (tl.load(targets + row, mask=row < rows, other=-1) >= 0).to(tl.int32)
        tl.store(order + found + tl.cumsum(works, axis=0) - works, row.to(tl.int64), mask=works != 0)
        found += tl.sum(works)
    tl.store(count + tl.arange(0, 1), found)


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def gather_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    bias,  # (V,) or None
    inv_temperature,  # (N,) float32 or None
    targets,  # (N,) int64
    order,  # (N,) int64
    count,  # (1,) int32
    hidden_out,  # (N, H), written
    inv_temperature_out,  # (N,) float32, written, or None
    target_out,  # (N,) float32, written
    rows,
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Copies rows to where their work is done, and forms one product a row: picked out of the forward's tiles
    it would cost them half of their epilogue.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = place < tl.load(count)
    row = tl.load(order + place, mask=live, other=0)
    target = tl.load(targets + row, mask=live, other=-1)
    here = live & (target < vocabulary)
    x = hidden + row[:, None] * hidden_stride
    w = weight + target[:, None] * weight_stride
    copied = hidden_out + place.to(tl.int64)[:, None] * hidden_size
    products = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for start in range(0, hidden_size, DEPTH):
        step = start + tl.arange(0, DEPTH)
        inside = (step < hidden_size)[None, :]
        x_part = tl.load(x + step[None, :], mask=live[:, None] & inside, other=0.0)
        w_part = tl.load(w + step[None, :], mask=here[:, None] & inside, other=0.0)
        tl.store(copied + step[None, :], x_part, mask=live[:, None] & inside)
        products += x_part.to(tl.float32) * w_part.to(tl.float32)
    product = tl.sum(products, axis=1)
    if bias is not None:
        product += tl.load(bias + target, mask=here, other=0.0).to(tl.float32)
    z = transform_logits(
        product[:, None], None, inv_temperature, logit_scale, softcap, row, row, rows, vocabulary
    )
    tl.store(target_out + row[:, None], z, mask=live[:, None])
    if inv_temperature_out is not None:
        tl.store(inv_temperature_out + place, tl.load(inv_temperature + row, mask=live), mask=live)


@triton.jit(do_not_specialize=["rows", "vocabulary", "tiles"])
def finalise_kernel(
    lse_in,  # (N, T) float32
    entropy_in,  # (N, T) float32 or None, as the next three
    total_in,
    maximum_in,
    squares_in,
    target_in,  # (N,) float32
    targets,  # (N,) int64
    logprob_out,  # (N,) float32, as all below
    lse_out,
    entropy_out,
    mean_out,
    maximum_out,
    target_out,
    squares_out,
    tile_stride,
    rows,
    vocabulary,
    tiles,  # T
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    target = tl.load(targets + row, mask=inside, other=-1)
    live = target >= 0
    line = row.to(tl.int64)[:, None] * tile_stride
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        read = live[:, None] & (tile < tiles)[None, :]
        lse = tl.load(lse_in + line + tile[None, :], mask=read, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(lse, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(maximum - base) + tl.sum(tl.exp(lse - base[:, None]), axis=1)
        maximum = higher
    lse = tl.where(maximum == float("-inf"), 0.0, maximum) + tl.log(mass)

    here = live & (target < vocabulary)
    target_logit = tl.load(target_in + row, mask=here, other=0.0)
    # Summed in another order than the target's tile, the log-sum-exp can fall an ulp short of a sure target.
    logprob = target_logit - lse
    logprob = tl.where(logprob > 0, 0.0, logprob)
    tl.store(lse_out + row, tl.where(live, lse, 0.0), mask=inside)
    tl.store(logprob_out + row, tl.where(here, logprob, 0.0), mask=inside)

    if entropy_in is not None or total_in is not None or maximum_in is not None or squares_in is not None:
        zero = tl.zeros((ROWS,), tl.float32)
        entropy = zero
        total = zero
        squares = zero
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        for first in range(0, tiles, TILES):
            tile = first + tl.arange(0, TILES)
            at = line + tile[None, :]
            read = live[:, None] & (tile < tiles)[None, :]
            behind = tl.load(lse_in + at, mask=read, other=float("-inf")) - lse[:, None]
            share = tl.exp(behind)
            if entropy_in is not None:
                within = tl.load(entropy_in + at, mask=read, other=0.0)
                entropy += tl.sum(tl.where(share > 0, share * (within - behind), 0.0), axis=1)
            if total_in is not None:
                total += tl.sum(tl.load(total_in + at, mask=read, other=0.0), axis=1)
            if maximum_in is not None:
                highest_here = tl.max(tl.load(maximum_in + at, mask=read, other=float("-inf")), axis=1)
                highest = tl.maximum(highest, highest_here)
            if squares_in is not None:
                within = tl.load(squares_in + at, mask=read, other=0.0)
                squares += tl.sum(tl.where(share > 0, share * share * tl.exp(within), 0.0), axis=1)
        if entropy_in is not None:
            tl.store(entropy_out + row, tl.where(live, entropy, 0.0), mask=inside)
        if total_in is not None:
            tl.store(mean_out + row, total / vocabulary, mask=inside)
        if maximum_in is not None:
            tl.store(maximum_out + row, tl.where(live, highest, 0.0), mask=inside)
            tl.store(target_out + row, target_logit, mask=inside)
        if squares_in is not None:
            tl.store(squares_out + row, tl.where(live, tl.log(squares), 0.0), mask=inside)


def gather_rows(problem: HeadProblem) -> Gathered:
    """The rows with work, for `tile_statistics`. No host synchronisation."""
    hidden, targets, inv_temperature = problem.hidden, problem.targets, problem.inv_temperature
    rows, depth = hidden.shape
    gathered = Gathered(
        hidden=torch.empty_like(hidden, memory_format=torch.contiguous_format),
        inv_temperature=None if inv_temperature is None else torch.empty_like(inv_temperature),
        order=torch.empty_like(targets),
        count=targets.new_empty(1, dtype=torch.int32),
        target_logit=hidden.new_empty(rows, dtype=torch.float32),
    )
    order_kernel[(1,)](targets, gathered.order, gathered.count, rows, BLOCK=_ORDER_ROWS, num_warps=8)
    gather_kernel[(triton.cdiv(rows, _TARGET_ROWS),)](
        hidden, problem.weight, targets=targets, order=gathered.order, count=gathered.count,
        hidden_out=gathered.hidden, inv_temperature_out=gathered.inv_temperature,
        target_out=gathered.target_logit, rows=rows, vocabulary=problem.vocabulary, hidden_size=depth,
        hidden_stride=hidden.stride(0), weight_stride=problem.weight.stride(0),
        **transform_arguments(problem), ROWS=_TARGET_ROWS, DEPTH=_TARGET_DEPTH, num_warps=4,
    )  # fmt: skip
    return gathered


def tile_statistics(
    problem: HeadProblem,
    gathered: Gathered,
    *,
    tile: ProductTile,
    entropy: bool = False,
    mean: bool = False,
    maximum: bool = False,
    squares: bool = False,
    keep: tuple[Tensor, Tensor] | None = None,
) -> TileStatistics:
    """Launches the product. No host synchronisation.

    Args:
        problem: its operands have unit stride along H.
        gathered: its rows.
        maximum: the tiles' maxima; the targets' logits of `gathered` are taken out of the tiles then, so that
            equal logits are equal.
        keep: (N, V) that receives exponentials relative to a number of the row, (N,) float32: `exponentials`.
    """
    rows, vocabulary = problem.targets.numel(), problem.vocabulary
    tiles = triton.cdiv(vocabulary, TILE)

    def per_tile(present: bool) -> Tensor | None:
        return row_aligned(rows, tiles, problem.hidden, torch.float32) if present else None

    result = TileStatistics(
        lse=row_aligned(rows, tiles, problem.hidden, torch.float32),
        entropy=per_tile(entropy),
        total=per_tile(mean),
        maximum=per_tile(maximum),
        squares=per_tile(squares),
    )
    kept, reference = keep or (None, None)
    programs = program_count(problem.hidden.device)
    of_work = problem._replace(hidden=gathered.hidden, inv_temperature=gathered.inv_temperature)
    forward_kernel[(programs,)](
        **product_arguments(of_work, tile), targets=problem.targets, order=gathered.order,
        count=gathered.count, lse_out=result.lse, target_out=gathered.target_logit if maximum else None,
        entropy_out=result.entropy, total_out=result.total, maximum_out=result.maximum,
        squares_out=result.squares, kept_out=kept, reference=reference, tile_stride=result.lse.stride(0),
        kept_stride=0 if kept is None else kept.stride(0), programs=programs,
        EVEN_COLUMNS=vocabulary % TILE == 0,  # a whole mass tile past the vocabulary is never stored
        TILE=TILE,
    )  # fmt: skip
    return result


def row_results(tiles: TileStatistics, problem: HeadProblem, target_logit: Tensor) -> tuple[Tensor, ...]:
    """Folds the tiles into per-row results.

    Args:
        target_logit: (N,) float32, of `gather_rows`.

    Returns:
        (N,) float32 each: log-probability, log-sum-exp, entropy, mean logit, largest logit, target's logit,
        log Σ p²; zero for rows without work, (0,) for what the tiles do not have.
    """
    rows = problem.targets.numel()
    of = (tiles.lse, tiles.lse, tiles.entropy, tiles.total, tiles.maximum, tiles.maximum, tiles.squares)
    results = tuple(tiles.lse.new_empty(0 if part is None else rows) for part in of)
    finalise_kernel[(triton.cdiv(rows, _FINALISE_ROWS),)](
        *tiles, target_logit, problem.targets, *results, tiles.lse.stride(0), rows, problem.vocabulary,
        tiles.lse.shape[1], ROWS=_FINALISE_ROWS, TILES=_FINALISE_TILES, num_warps=4,
    )  # fmt: skip
    return results


_ORDER_ROWS = 2048
_TARGET_ROWS = 16
_TARGET_DEPTH = 128
_FINALISE_ROWS = 8
_FINALISE_TILES = 256
