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
reaches the gradient.

Rows that are live nearly everywhere can be set apart for the dense path (`dense_rows`): they have no pairs
and leave out nothing. The border is the list's room per row, so a list without such rows never overflows.

Everything stays on the device, in buffers of fixed capacity, and every list is in ascending order:
bit-equal from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BF16_ROUNDING, LEVELS, PAIR_SHARE, TILE, SparseConfig, cuda
from .balance import balance, log_levels

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, LogitGradient


@dataclass(frozen=True)
class Pairs:
    """The live pairs of N rows and T tiles, sorted by tile, then row; and per row what they leave out.

    Where `overflow` is set the lists are empty: the batch belongs to the dense path.
    """

    rows: Tensor  # (capacity,) int32: rows of all pairs
    offsets: Tensor  # (T + 1,) int64: pairs of tile t are rows[offsets[t]:offsets[t + 1]]
    block_offsets: Tensor  # (T + 1,) int32: the same in blocks of `config.pair_rows`
    block_tile: Tensor  # (blocks,) int32: tile of every block
    chunk_tiles: Tensor  # (chunks + 1,) int32: first tile of every chunk of logit gradients
    live_bits: Tensor  # (ceil(T / 32), N) int32: bit t % 32 of word t // 32
    rank_base: Tensor  # (ceil(T / 32), N) int32: live tiles of the row before this word
    row_ends: Tensor  # (N,) int64: end of the row's pairs in row-major order
    live_count: Tensor  # (N,) int32: live tiles of the row
    dense_rows: Tensor  # (N,) bool: set apart for the dense path
    total: Tensor  # (1,) int64: live pairs, also when they overflow
    overflow: Tensor  # (1,) int32
    target_gradient: Tensor  # (N,) float32: dL/dz of the target
    mass_gradient: Tensor  # (N,) float32: c; dL/dz is −c·p elsewhere
    log_threshold: Tensor  # (N,) float32: tiles with a smaller log mass are left out
    left_out: Tensor  # (N,) float32: μ, the probability in no live pair
    norm: Tensor  # () float32: sqrt(Σ_i (Σ_v|G_iv|)²)
    tolerance: float
    config: SparseConfig

    def budget(self, share: float) -> Tensor:
        """() float32: what Σ (c·μ)² may reach."""
        return (share * self.tolerance * BF16_ROUNDING * self.norm).square()

    def metrics(self, left_out: Tensor | None = None) -> dict[str, Tensor]:
        """Detached scalars on the device; nothing waits for it.

        `density`: live pairs of all pairs, those of dense rows among them. `left_out_mean`, `left_out_max`:
        probability in no visited entry, over the rows with a gradient. `error_bound`: the certified error in
        units of the certified error of rounding the logit gradient to bfloat16; at most `tolerance`.

        Args:
            left_out: (N,) float32, `SparseGradients.left_out`; by default what the pairs leave out, which is
                what the weight's gradient misses.
        """
        rows, tiles = self.left_out.numel(), self.offsets.numel() - 1
        left_out = self.left_out if left_out is None else left_out
        dense = self.dense_rows.sum()
        active = (dense + (self.live_count > 0).sum()).clamp(min=1)
        error = (self.mass_gradient * left_out).nan_to_num().square().sum().sqrt()
        return {
            "density": (self.total[0] + dense * tiles) / max(rows * tiles, 1),
            "left_out_mean": left_out.sum() / active,
            "left_out_max": left_out.max() if rows else left_out.sum(),
            "error_bound": torch.where(error > 0, error / (BF16_ROUNDING * self.norm), 0.0),
        }


def select_pairs(
    problem: HeadProblem,
    of_rows: LogitGradient,
    tile_lse: Tensor,
    *,
    tolerance: float,
    split_rows: bool = False,
    config: SparseConfig,
) -> Pairs:
    """Live pairs for upstream gradients of the log-probability and the log-sum-exp.

    Gradients of the entropy or the mean logit are not sparse in the probability: they go to the dense path.

    Args:
        of_rows: a row where `mass` and `target` are zero costs nothing.
        tile_lse: (T, N) float32 contiguous, log-sum-exp of each row's logits over each tile of `TILE`
            columns.
        tolerance: error allowed, relative to rounding the logit gradient to bfloat16; 0 leaves out only
            what is zero in float32. With the vocabulary split over P ranks each rank must pass its P-th
            part.
        split_rows: set rows with more live tiles than the list has room for per row apart, as `dense_rows`.
        config: capacities and blocks.
    """
    targets, logsumexp, vocabulary = problem.targets, of_rows.logsumexp, problem.vocabulary
    itemsize = problem.hidden.element_size()
    tiles, rows = -(-vocabulary // TILE), targets.numel()
    target_gradient, mass_gradient = of_rows.target, -of_rows.mass  # a copy: dense rows are taken out of it
    # A row's entries beside the target's sum to mass·(1 − p). A row of NaN is left out of the norm.
    total = target_gradient.abs() + mass_gradient.abs() * -torch.expm1(of_rows.logprob)
    norm = total.nan_to_num(nan=0.0).square().sum().sqrt()
    working = (target_gradient != 0) | (mass_gradient != 0)  # true for NaN
    capacity, chunk_pairs = config.pair_capacity(rows, tiles), config.chunk_pairs(rows, itemsize)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=tile_lse.device)

    words = -(-tiles // 32)
    live_bits, rank_base, live_count = empty(words, rows), empty(words, rows), empty(rows)
    dense_rows = empty(rows, dtype=torch.bool)
    row_limit = capacity // max(rows, 1) if split_rows else tiles
    curve = empty(LEVELS, rows, dtype=torch.float32)
    block_tiles = max(32, triton.next_power_of_2(tiles))
    block_rows = max(1, min(64, _MARK_ELEMENTS // block_tiles))
    counts, offsets, block_offsets = empty(tiles), empty(tiles + 1, dtype=torch.int64), empty(tiles + 1)
    chunks = config.chunks(rows, tiles, itemsize)
    chunk_tiles, total, overflow = empty(chunks + 1), empty(1, dtype=torch.int64), empty(1)
    pair_rows, block_tile = empty(capacity), empty(config.block_capacity(rows, tiles))

    levels = log_levels(tile_lse.device)
    inputs = tile_lse, logsumexp, targets, working
    sizes = {"TILE": TILE, "BLOCK_TILES": block_tiles, "BLOCK_ROWS": block_rows, "num_warps": 8}
    if config.cuda_curve:
        curve = cuda.mass_curve(*inputs, levels, vocabulary=vocabulary)
    elif rows:
        _mass_curve[(triton.cdiv(rows, block_rows),)](
            *inputs, levels, curve, rows, tiles, vocabulary, LEVELS=LEVELS, **sizes
        )
    budget = (PAIR_SHARE * tolerance * BF16_ROUNDING * norm).square()
    balanced = balance(curve, levels, mass_gradient, budget)
    if rows:
        _mark_live[(triton.cdiv(rows, block_rows),)](
            *inputs,
            balanced.log_threshold,
            live_bits,
            rank_base,
            live_count,
            dense_rows,
            balanced.left_out,
            mass_gradient,
            row_limit,
            rows,
            tiles,
            vocabulary,
            **sizes,
        )
    _count_tile[(tiles,)](live_bits, counts, rows, BLOCK=_SCAN_BLOCK)
    _lay_out[(1,)](
        counts, offsets, block_offsets, chunk_tiles, total, overflow, tiles, capacity, chunk_pairs, chunks,
        PAIR_ROWS=config.pair_rows, BLOCK_TILES=block_tiles, num_warps=8,
    )  # fmt: skip
    _compact_tile[(tiles,)](
        live_bits, offsets, block_offsets, overflow, pair_rows, block_tile, rows, BLOCK=_SCAN_BLOCK
    )
    return Pairs(
        rows=pair_rows, offsets=offsets, block_offsets=block_offsets, block_tile=block_tile,
        chunk_tiles=chunk_tiles, live_bits=live_bits, rank_base=rank_base,
        row_ends=live_count.cumsum(0), live_count=live_count, dense_rows=dense_rows,
        total=total, overflow=overflow,
        target_gradient=target_gradient, mass_gradient=mass_gradient,
        log_threshold=balanced.log_threshold, left_out=balanced.left_out, norm=norm,
        tolerance=tolerance, config=config,
    )  # fmt: skip


_MARK_ELEMENTS = 16384
"""(tiles, rows) elements of one program of `_mass_curve` and `_mark_live`: 64 per thread."""

_SCAN_BLOCK = 2048


@triton.jit
def _load_log_mass(
    tile_lse,  # (T, N) float32
    logsumexp,  # (N,) float32
    targets,  # (N,) int64
    working,  # (N,) bool
    rows,
    tiles,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """All tiles of a few rows in registers: log mass and where the target is, (BLOCK_TILES, BLOCK_ROWS)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tile = tl.arange(0, BLOCK_TILES)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    target_tile = tl.where((target >= 0) & (target < vocabulary), target // TILE, -1).to(tl.int32)
    active = tl.load(working + row, mask=row < rows, other=0) != 0
    inside = (tile < tiles)[:, None] & active[None, :]
    place = tile[:, None].to(tl.int64) * rows + row[None, :]
    log_mass = tl.load(tile_lse + place, mask=inside, other=float("-inf"))
    log_mass -= tl.load(logsumexp + row, mask=row < rows, other=0.0)[None, :]
    return log_mass, (tile[:, None] == target_tile[None, :]) & inside, inside, row


@triton.jit(do_not_specialize=["rows", "tiles", "vocabulary"])
def _mass_curve(
    tile_lse,
    logsumexp,
    targets,
    working,
    levels,  # (LEVELS,) float32
    curve,  # (LEVELS, N) float32, written: mass of the tiles below each level, the target's excepted
    rows,
    tiles,
    vocabulary,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    log_mass, is_target, inside, row = _load_log_mass(
        tile_lse, logsumexp, targets, working, rows, tiles, vocabulary, TILE, BLOCK_TILES, BLOCK_ROWS
    )
    mass = tl.where(inside & ~is_target, tl.exp(log_mass), 0.0)
    for level in range(LEVELS):
        below = tl.sum(tl.where(log_mass < tl.load(levels + level), mass, 0.0), axis=0)
        tl.store(curve + level * rows.to(tl.int64) + row, below, mask=row < rows)


@triton.jit(do_not_specialize=["row_limit", "rows", "tiles", "vocabulary"])
def _mark_live(
    tile_lse,
    logsumexp,
    targets,
    working,
    log_threshold,  # (N,) float32
    live_bits,  # (ceil(T / 32), N) int32, written
    rank_base,  # (ceil(T / 32), N) int32, written
    live_count,  # (N,) int32, written
    dense_rows,  # (N,) bool, written
    left_out,  # (N,) float32, zeroed for dense rows
    mass_gradient,  # (N,) float32, the same: what the lists hold no longer weighs them
    row_limit,  # a row with more live tiles is dense
    rows,
    tiles,
    vocabulary,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    log_mass, is_target, inside, row = _load_log_mass(
        tile_lse, logsumexp, targets, working, rows, tiles, vocabulary, TILE, BLOCK_TILES, BLOCK_ROWS
    )
    threshold = tl.load(log_threshold + row, mask=row < rows, other=0.0)
    below = (log_mass < threshold[None, :]) | (tl.exp(log_mass) == 0.0)
    live = (~below | is_target) & inside
    dense = tl.sum(live.to(tl.int32), axis=0) > row_limit
    live &= ~dense[None, :]
    tl.store(dense_rows + row, dense, mask=row < rows)
    tl.store(left_out + row, 0.0, mask=dense)
    tl.store(mass_gradient + row, 0.0, mask=dense)

    WORDS: tl.constexpr = BLOCK_TILES // 32
    bits = tl.reshape(live.to(tl.int32), (WORDS, 32, BLOCK_ROWS))
    in_word = tl.sum(bits, axis=1)
    packed = tl.sum(bits << tl.arange(0, 32)[None, :, None], axis=1)
    word = tl.arange(0, WORDS)
    place = word[:, None] * rows + row[None, :]
    stored = (word < tl.cdiv(tiles, 32))[:, None] & (row < rows)[None, :]
    tl.store(live_bits + place, packed, mask=stored)
    tl.store(rank_base + place, tl.cumsum(in_word, axis=0) - in_word, mask=stored)
    tl.store(live_count + row, tl.sum(in_word, axis=0), mask=row < rows)


@triton.jit
def _live_column(live_bits, tile, row, rows):
    """Which of these rows are live in the tile, as int32."""
    word = tl.load(live_bits + (tile // 32).to(tl.int64) * rows + row, mask=row < rows, other=0)
    return (word >> (tile % 32)) & 1


@triton.jit(do_not_specialize=["rows"])
def _count_tile(live_bits, counts, rows, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    live = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        live += _live_column(live_bits, tile, start + tl.arange(0, BLOCK), rows)
    tl.store(counts + tile, tl.sum(live))


@triton.jit(do_not_specialize=["tiles", "capacity", "chunk_pairs", "chunks"])
def _lay_out(
    counts,  # (T,) int32
    offsets,  # (T + 1,) int64, written
    block_offsets,  # (T + 1,) int32, written
    chunk_tiles,  # (chunks + 1,) int32, written
    total,  # (1,) int64, written
    overflow,  # (1,) int32, written
    tiles,
    capacity,
    chunk_pairs,
    chunks,
    PAIR_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """One program: where every tile's pairs and blocks begin. On overflow every list is empty.

    Chunk k holds the tiles whose last pair lies in [k·chunk_pairs, (k + 1)·chunk_pairs).
    """
    tile = tl.arange(0, BLOCK_TILES)
    count = tl.load(counts + tile, mask=tile < tiles, other=0).to(tl.int64)
    found = tl.sum(count)
    too_many = found > capacity
    tl.store(total, found)
    tl.store(overflow, too_many.to(tl.int32))

    count = tl.where(too_many, 0, count)
    ends = tl.cumsum(count)
    blocks = tl.cdiv(count, PAIR_ROWS).to(tl.int32)
    tl.store(offsets + tile + 1, ends, mask=tile < tiles)
    tl.store(block_offsets + tile + 1, tl.cumsum(blocks), mask=tile < tiles)
    tl.store(offsets, tl.zeros_like(found))
    tl.store(block_offsets, 0)
    chunk = tl.maximum(ends - 1, 0) // chunk_pairs
    for k in range(0, chunks + 1):
        before = tl.sum(((chunk < k) & (tile < tiles)).to(tl.int32))
        tl.store(chunk_tiles + k, tl.where(too_many, 0, before))


@triton.jit(do_not_specialize=["rows"])
def _compact_tile(
    live_bits, offsets, block_offsets, overflow, pair_rows, block_tile, rows, BLOCK: tl.constexpr
):
    """Writes the tile's live rows in ascending order, and the tile's number beside each of its blocks."""
    if tl.load(overflow) != 0:  # every list is empty
        return
    tile = tl.program_id(0)
    place = tl.load(offsets + tile)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = _live_column(live_bits, tile, row, rows)
        tl.store(pair_rows + place + tl.cumsum(live) - live, row, mask=live != 0)
        place += tl.sum(live)
    first, last = tl.load(block_offsets + tile), tl.load(block_offsets + tile + 1)
    for start in range(first, last, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(block_tile + block, tl.full((BLOCK,), 0, tl.int32) + tile, mask=block < last)
