"""Which (row, vocabulary tile) pairs the backward must visit, and what leaving out the others costs at most.

The gradient of row i's logits is  g_i·onehot(target) − c_i·p_i  with c = g (less the upstream gradient of the
log-sum-exp, if there is one). The forward's sums give the mass m_it of every tile exactly, so the mass μ_i
of the tiles left out is known, not estimated, and bounds the error of row i's hidden gradient:

    ‖ΔdX_i‖ ≤ |c_i|·μ_i·max|dz/d(x·w)|·max_v‖W_v‖

**Tolerance.** Rounding the logit gradient G to bfloat16, as a dense backward does, has the same kind of
bound: every entry errs by up to u = 2^-8 of itself, so row i's hidden gradient by up to
u·Σ_v|G_iv|·max_v‖W_v‖. The selection guarantees

    sqrt(Σ_i (|c_i|·μ_i)²) ≤ tolerance · u · sqrt(Σ_i (Σ_v|G_iv|)²):

at `tolerance = 1` the certified error of the batch is what rounding G to bfloat16 is certified to cost. Both
bounds assume that all errors add up in one direction; both true errors are several times smaller.
`PAIR_SHARE` of the tolerance is spent here on whole pairs, the rest by the hidden gradient on single
entries.

Each row leaves out its smallest tiles, up to a threshold that `balance` sets. A pair is live if it is not
below, or holds the target. Rows whose upstream gradient is zero have no pairs. NaN is live, so that it
reaches the gradient. Rows that are live nearly everywhere are set apart for the dense path: they have no
pairs and leave out nothing.

Everything stays on the device, and every list is in ascending order: bit-equal from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BF16_ROUNDING, LEVELS, PAIR_SHARE, ROW_TILES, TILE, cuda
from .balance import balance, count_octaves, is_below, level_of, store_curve
from .coefficients import RowCoefficients
from .product import LOG2E

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem


@dataclass(frozen=True)
class Live:
    """Which pairs of N rows and T tiles are live, and per row what the others hold."""

    bits: Tensor  # (ceil(T / 32), N) int32: bit t % 32 of word t // 32
    rank_base: Tensor  # (ceil(T / 32), N) int32: live tiles of the row before this word
    count: Tensor  # (N,) int32: live tiles of the row
    row_ends: Tensor  # (N,) int64: the same, added up
    tile_counts: Tensor  # (T,) int32: live rows of the tile
    dense: Tensor  # (N,) bool: set apart
    left_out: Tensor  # (N,) float32: μ, the probability in no live pair; zero for rows set apart
    found: Tensor  # (2,) int64: live pairs, rows set apart


def select_live(
    problem: HeadProblem,
    rows: RowCoefficients,
    tile_lse: Tensor,
    *,
    tolerance: float,
    row_tiles: int = ROW_TILES,
) -> Live:
    """
    Args:
        tile_lse: (N, T) float32, log-sum-exp of each row's logits over each tile of `TILE` columns.
        tolerance: error allowed, relative to rounding the logit gradient to bfloat16; 0 leaves out only
            what is zero in float32. With the vocabulary split over P ranks each rank must pass its P-th
            part.
        row_tiles: a row with more live tiles is set apart.
    """
    count, tiles = tile_lse.shape
    inputs = tile_lse, rows.logsumexp, problem.targets, rows.target, rows.mass
    block = triton.next_power_of_2(max(tiles, 32))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return tile_lse.new_empty(shape, dtype=dtype)

    words = -(-tiles // 32)
    live = Live(
        empty(words, count), empty(words, count), empty(count), empty(count, dtype=torch.int64),
        empty(tiles), empty(count, dtype=torch.bool), empty(count, dtype=torch.float32),
        empty(2, dtype=torch.int64),
    )  # fmt: skip
    sizes = tile_lse.stride(0), tiles, problem.vocabulary
    mass_curve = cuda.mass_curve if cuda.usable(tile_lse.device) else counted_curve
    curve = mass_curve(*inputs, vocabulary=problem.vocabulary)
    kappa = balance(curve, rows.mass, rows.squares, PAIR_SHARE * tolerance * BF16_ROUNDING)
    if count:
        _mark_live[(count,)](
            *inputs, curve, kappa, live.bits, live.rank_base, live.count, live.dense, live.left_out,
            min(row_tiles, ROW_TILES), count, *sizes, TILE=TILE, BLOCK=block, num_warps=4,
        )  # fmt: skip
    torch.cumsum(live.count, 0, out=live.row_ends)
    _count_tile[(tiles,)](live.bits, live.tile_counts, count, BLOCK=_SCAN)
    _count_all[(1,)](live.tile_counts, live.dense, live.found, tiles, count, BLOCK=_SCAN)
    return live


def counted_curve(tile_lse: Tensor, *rows: Tensor, vocabulary: int) -> Tensor:
    """(N, LEVELS) float32: at least the mass of a row's tiles below each level, the target's tile excepted.

    Args:
        tile_lse: (N, T) float32.
        rows: logsumexp, targets, target_gradient and mass_gradient, (N,).
    """
    count, tiles = tile_lse.shape
    curve = tile_lse.new_empty((count, LEVELS))
    if count:
        _mass_curve[(count,)](
            tile_lse, *rows, curve, tile_lse.stride(0), tiles, vocabulary,
            TILE=TILE, BLOCK=triton.next_power_of_2(max(tiles, 32)), num_warps=4,
        )  # fmt: skip
    return curve


_SCAN = 2048


@triton.jit
def _row_masses(
    tile_lse,  # (N, T) float32
    logsumexp,  # (N,) float32
    targets,  # (N,) int64
    target_gradient,  # (N,) float32
    mass_gradient,  # (N,) float32
    row,
    row_stride,
    tiles,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log2 of the masses of a row's tiles, which of them are there, and which holds the target, (BLOCK,)."""
    gradient = tl.abs(tl.load(target_gradient + row)) + tl.abs(tl.load(mass_gradient + row))
    target = tl.load(targets + row)
    target_tile = tl.where((target >= 0) & (target < vocabulary), target // TILE, -1).to(tl.int32)
    tile = tl.arange(0, BLOCK)
    inside = tile < tl.where(gradient == 0.0, 0, tiles)  # a row of NaN works
    lse = tl.load(tile_lse + row.to(tl.int64) * row_stride + tile, mask=inside, other=float("-inf"))
    log2_mass = (lse - tl.load(logsumexp + row)) * LOG2E
    return log2_mass, inside, inside & (tile == target_tile)


@triton.jit(do_not_specialize=["tiles", "vocabulary"])
def _mass_curve(
    tile_lse,
    logsumexp,
    targets,
    target_gradient,
    mass_gradient,
    curve,  # (N, LEVELS) float32, written: at least the mass below each level, the target's tile excepted
    row_stride,
    tiles,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    log2_mass, inside, has_target = _row_masses(
        tile_lse, logsumexp, targets, target_gradient, mass_gradient, row, row_stride, tiles, vocabulary,
        TILE, BLOCK,
    )  # fmt: skip
    store_curve(curve, row, count_octaves(log2_mass, inside & ~has_target), 0.0, FACTOR=1.0)


@triton.jit(do_not_specialize=["row_tiles", "rows", "tiles", "vocabulary"])
def _mark_live(
    tile_lse,
    logsumexp,
    targets,
    target_gradient,
    mass_gradient,
    curve,
    kappa,
    bits,  # (ceil(T / 32), N) int32, written, as all that follow
    rank_base,
    live_count,
    dense_rows,
    left_out,
    row_tiles,
    rows,
    row_stride,
    tiles,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: which tiles are live, and the mass of the others."""
    row = tl.program_id(0)
    log2_mass, inside, has_target = _row_masses(
        tile_lse, logsumexp, targets, target_gradient, mass_gradient, row, row_stride, tiles, vocabulary,
        TILE, BLOCK,
    )  # fmt: skip
    level = level_of(curve, row, tl.load(mass_gradient + row), tl.load(kappa))
    live = (~is_below(log2_mass, level) | has_target) & inside
    dense = tl.sum(live.to(tl.int32)) > row_tiles
    mass = tl.sum(tl.where(inside & ~live, tl.exp2(log2_mass), 0.0))
    live &= ~dense
    tl.store(dense_rows + row, dense)
    tl.store(left_out + row, tl.where(dense, 0.0, mass))

    WORDS: tl.constexpr = BLOCK // 32
    bit = tl.reshape(live.to(tl.int32), (WORDS, 32))
    in_word = tl.sum(bit, axis=1)
    word = tl.arange(0, WORDS)
    stored = word < tl.cdiv(tiles, 32)
    place = word.to(tl.int64) * rows + row
    tl.store(bits + place, tl.sum(bit << tl.arange(0, 32)[None, :], axis=1), mask=stored)
    tl.store(rank_base + place, tl.cumsum(in_word, axis=0) - in_word, mask=stored)
    tl.store(live_count + row, tl.sum(in_word))


@triton.jit
def bits_of_tile(bits, tile, row, rows):
    """The word of these rows that holds the tile."""
    return tl.load(bits + (tile // 32).to(tl.int64) * rows + row, mask=row < rows, other=0)


@triton.jit(do_not_specialize=["rows"])
def _count_tile(bits, tile_counts, rows, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    live = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        live += (bits_of_tile(bits, tile, start + tl.arange(0, BLOCK), rows) >> (tile % 32)) & 1
    tl.store(tile_counts + tile, tl.sum(live))


@triton.jit(do_not_specialize=["tiles", "rows"])
def _count_all(tile_counts, dense_rows, found, tiles, rows, BLOCK: tl.constexpr):
    pairs = tl.zeros((BLOCK,), dtype=tl.int64)
    dense = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        pairs += tl.load(tile_counts + tile, mask=tile < tiles, other=0)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        dense += tl.load(dense_rows + row, mask=row < rows, other=0).to(tl.int64)
    tl.store(found, tl.sum(pairs))
    tl.store(found + 1, tl.sum(dense))
