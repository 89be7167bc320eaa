"""The forward: X Wᵀ whose float32 logits never leave registers, reduced to a few numbers per (row, mass
tile).

Persistent programs write the log-sum-exp of every mass tile and what optional statistics need; two small
kernels give the targets' logits and fold the tiles into per-row results. A program's tile is several mass
tiles wide, so that the product runs at full speed while the tile masses stay fine. An optional statistic
whose output is None is not in the machine code.

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


class TileStatistics(NamedTuple):
    """Per mass tile and row, float32, T = ceil(V / TILE); None where not wanted.

    Undefined past the rows in use.
    """

    lse: Tensor  # (T, N) log-sum-exp of the tile's logits
    target_logit: Tensor  # (N,) zero where the target is not in this weight
    entropy: Tensor | None  # (T, N) of the distribution within the tile
    total: Tensor | None  # (T, N) sum of the tile's logits
    maximum: Tensor | None  # (T, N)
    squares: Tensor | None  # (T, N) log Σ (p within the tile)²


# `vocabulary` is specialised: where it may be no multiple of 16, what is kept is stored two bytes at a time.
@triton.jit(do_not_specialize=["capacity", "programs"])
def forward_kernel(
    hidden,  # (N, H): see tile_products
    weight,  # (V, H)
    bias,  # (V,)
    inv_temperature,  # (N,) float32
    targets,  # (N,) int64
    count,  # () int32: rows in use
    lse_out,  # (T, N) float32
    target_out,  # (N,) float32 or None: the logit that equals the maximum where the target is the likeliest
    entropy_out,  # (T, N) float32 or None, as the next three
    total_out,
    maximum_out,
    squares_out,
    kept_out,  # (N, V) exponentials relative to the mass tile's maximum, or None
    capacity,  # N
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
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

        # Positions relative to the tile, in 32 bits: compared with constants, they take no registers.
        offset = tl.arange(0, COLUMNS)
        inside = offset < vocabulary - first_column
        if target_out is not None:
            target = (tl.load(targets + row, mask=live, other=-1) - first_column).to(tl.int32)
            target_logit = tl.sum(tl.where(offset[None, :] == target[:, None], z, 0.0), axis=1)
            here = (target >= 0) & (target < tl.minimum(COLUMNS, vocabulary - first_column))
            tl.store(target_out + row, target_logit, mask=live & here)

        mass_tile = column_block * HALVES + tl.arange(0, HALVES)
        at = mass_tile[None, :].to(tl.int64) * capacity + row[:, None]
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
        e = tl.exp2(tl.fma(z, LOG2E, (-base * LOG2E)[:, :, None]))
        mass = tl.sum(e, axis=2)
        log_mass = tl.log(mass)
        tl.store(lse_out + at, base + log_mass, mask=kept)
        if kept_out is not None:
            line = kept_out + row.to(tl.int64) * kept_stride
            kept_e = tl.reshape(e, (ROWS, COLUMNS)).to(kept_out.dtype.element_ty)
            tl.store(line[:, None] + column[None, :], kept_e, mask=live[:, None] & inside[None, :])
        if entropy_out is not None:
            surprise = tl.sum(tl.where(e > 0, e * (z - base[:, :, None]), 0.0), axis=2)
            tl.store(entropy_out + at, tl.where(mass > 0, log_mass - surprise / mass, 0.0), mask=kept)
        if squares_out is not None:
            squares = tl.log(tl.sum(e * e, axis=2)) - 2.0 * log_mass
            tl.store(squares_out + at, tl.where(mass > 0, squares, 0.0), mask=kept)


@triton.jit(do_not_specialize=["vocabulary"])
def target_logit_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    bias,  # (V,) or None
    inv_temperature,  # (N,) float32 or None
    targets,  # (N,) int64
    count,  # () int32: rows in use
    target_out,  # (N,) float32, written where the target is in this weight
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One product a row: picked out of the forward's tiles it would cost them half of their epilogue."""
    rows = tl.load(count)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    here = (target >= 0) & (target < vocabulary)
    x = hidden + row.to(tl.int64)[:, None] * hidden_stride
    w = weight + target[:, None] * weight_stride
    products = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for start in range(0, hidden_size, DEPTH):
        step = start + tl.arange(0, DEPTH)
        read = here[:, None] & (step < hidden_size)[None, :]
        x_part = tl.load(x + step[None, :], mask=read, other=0.0).to(tl.float32)
        products += x_part * tl.load(w + step[None, :], mask=read, other=0.0).to(tl.float32)
    product = tl.sum(products, axis=1)
    if bias is not None:
        product += tl.load(bias + target, mask=here, other=0.0).to(tl.float32)
    z = transform_logits(
        product[:, None], None, inv_temperature, logit_scale, softcap, row, row, rows, vocabulary
    )
    tl.store(target_out + row[:, None], z, mask=here[:, None])


@triton.jit(do_not_specialize=["capacity", "vocabulary", "tiles"])
def finalise_kernel(
    lse_in,  # (T, N) float32
    target_in,  # (N,) float32
    entropy_in,  # (T, N) float32 or None, as the next three
    total_in,
    maximum_in,
    squares_in,
    targets,  # (N,) int64
    order,  # (N,) int64: where each row's results go
    count,  # () int32: rows in use
    logprob_out,  # (N,) float32, as all below
    lse_out,
    entropy_out,
    mean_out,
    maximum_out,
    target_out,
    squares_out,
    capacity,
    vocabulary,
    tiles,  # T
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(count)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = tile[:, None].to(tl.int64) * capacity + row[None, :]
        read = (tile < tiles)[:, None] & live[None, :]
        lse = tl.load(lse_in + at, mask=read, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(lse, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(maximum - base) + tl.sum(tl.exp(lse - base[None, :]), axis=0)
        maximum = higher
    lse = tl.where(maximum == float("-inf"), 0.0, maximum) + tl.log(mass)

    to = tl.load(order + row, mask=live, other=0)
    target = tl.load(targets + row, mask=live, other=-1)
    target_logit = tl.load(target_in + row, mask=live, other=0.0)
    # Summed in another order than the target's tile, the log-sum-exp can fall an ulp short of a sure target.
    logprob = target_logit - lse
    logprob = tl.where(logprob > 0, 0.0, logprob)
    tl.store(lse_out + to, lse, mask=live)
    tl.store(logprob_out + to, tl.where(target < vocabulary, logprob, 0.0), mask=live)

    if entropy_in is not None or total_in is not None or maximum_in is not None or squares_in is not None:
        zero = tl.zeros((ROWS,), tl.float32)
        entropy = zero
        total = zero
        squares = zero
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        for first in range(0, tiles, TILES):
            tile = first + tl.arange(0, TILES)
            at = tile[:, None].to(tl.int64) * capacity + row[None, :]
            read = (tile < tiles)[:, None] & live[None, :]
            behind = tl.load(lse_in + at, mask=read, other=float("-inf")) - lse[None, :]
            share = tl.exp(behind)
            if entropy_in is not None:
                within = tl.load(entropy_in + at, mask=read, other=0.0)
                entropy += tl.sum(tl.where(share > 0, share * (within - behind), 0.0), axis=0)
            if total_in is not None:
                total += tl.sum(tl.load(total_in + at, mask=read, other=0.0), axis=0)
            if maximum_in is not None:
                highest_here = tl.max(tl.load(maximum_in + at, mask=read, other=float("-inf")), axis=0)
                highest = tl.maximum(highest, highest_here)
            if squares_in is not None:
                within = tl.load(squares_in + at, mask=read, other=0.0)
                squares += tl.sum(tl.where(share > 0, share * share * tl.exp(within), 0.0), axis=0)
        if entropy_in is not None:
            tl.store(entropy_out + to, entropy, mask=live)
        if total_in is not None:
            tl.store(mean_out + to, total / vocabulary, mask=live)
        if maximum_in is not None:
            tl.store(maximum_out + to, highest, mask=live)
            tl.store(target_out + to, target_logit, mask=live)
        if squares_in is not None:
            tl.store(squares_out + to, tl.log(squares), mask=live)


def tile_statistics(
    problem: HeadProblem,
    working: Tensor,
    *,
    tile: ProductTile,
    entropy: bool = False,
    mean: bool = False,
    maximum: bool = False,
    squares: bool = False,
    keep: Tensor | None = None,
) -> TileStatistics:
    """Launches the forward and the targets' products. No host synchronisation.

    Args:
        problem: its operands have unit stride along H; its first `working` rows are in use.
        working: () int32 on the device.
        maximum: the tiles' maxima, and the targets' logits out of the tiles, so that equal logits are equal.
        keep: (N, V) that receives the exponentials, see `kept`; the result then has the maxima as well.
    """
    rows, vocabulary = problem.targets.numel(), problem.vocabulary
    tiles = triton.cdiv(vocabulary, TILE)

    def per_tile(present: bool) -> Tensor | None:
        return problem.hidden.new_empty((tiles, rows), dtype=torch.float32) if present else None

    result = TileStatistics(
        lse=per_tile(True),
        target_logit=problem.hidden.new_zeros(rows, dtype=torch.float32),
        entropy=per_tile(entropy),
        total=per_tile(mean),
        maximum=per_tile(maximum or keep is not None),
        squares=per_tile(squares),
    )
    programs = program_count(problem.hidden.device)
    arguments = product_arguments(problem, tile)
    forward_kernel[(programs,)](
        **arguments, targets=problem.targets, count=working, lse_out=result.lse,
        target_out=result.target_logit if maximum else None,
        entropy_out=result.entropy, total_out=result.total, maximum_out=result.maximum,
        squares_out=result.squares, kept_out=keep, capacity=rows,
        kept_stride=0 if keep is None else keep.stride(0), programs=programs,
        EVEN_COLUMNS=vocabulary % TILE == 0,  # a whole mass tile past the vocabulary is never stored
        TILE=TILE,
    )  # fmt: skip
    if not maximum:
        shared = ("vocabulary", "hidden_size", "hidden_stride", "weight_stride")
        target_logit_kernel[(triton.cdiv(rows, _TARGET_ROWS),)](
            problem.hidden, problem.weight, targets=problem.targets, count=working,
            target_out=result.target_logit, **{name: arguments[name] for name in shared},
            **transform_arguments(problem), ROWS=_TARGET_ROWS, DEPTH=_TARGET_DEPTH, num_warps=4,
        )  # fmt: skip
    return result


def row_results(
    tiles: TileStatistics, targets: Tensor, order: Tensor, working: Tensor, vocabulary: int
) -> tuple[Tensor, ...]:
    """Folds the tiles into per-row results, written to the rows that `order` (N,) int64 names.

    Args:
        targets: (N,) int64 in the order of the tile statistics.
        working: () int32 on the device: rows in use.

    Returns:
        (N,) float32 each: log-probability, log-sum-exp, entropy, mean logit, largest logit, target's logit,
        log Σ p²; zero for rows that are not in use, (0,) for what the tiles do not have.
    """
    capacity = targets.shape[0]
    of = (tiles.lse, tiles.lse, tiles.entropy, tiles.total, tiles.maximum, tiles.maximum, tiles.squares)
    results = tuple(tiles.lse.new_zeros(0 if part is None else capacity) for part in of)
    finalise_kernel[(triton.cdiv(capacity, _FINALISE_ROWS),)](
        *tiles, targets, order, working, *results, capacity, vocabulary, tiles.lse.shape[0],
        ROWS=_FINALISE_ROWS, TILES=_FINALISE_TILES, num_warps=4,
    )  # fmt: skip
    return results


_TARGET_ROWS = 16
_TARGET_DEPTH = 128
_FINALISE_ROWS = 32
_FINALISE_TILES = 64
