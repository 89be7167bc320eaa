"""Select the (row, vocabulary tile) pairs of the backward: all large ones, and a sample of the small ones.

The gradient of row i's logits is −p·(c + e·(log p + H)) except at the target, and the forward computes the
mass m of every tile exactly. That bounds a pair's gradient beforehand:

    Σ_{v in tile} |dL/d(x·w_v)|  ≤  w = slope·m·(|c| + |e|·(|log m + H| + log TILE))

A pair with w ≥ τ is kept, as is the target's tile. A smaller pair is kept with probability w/τ, and its
gradient is multiplied by τ/w: dX and dW are **unbiased** for every τ, as under stochastic rounding. Dropping
small pairs would be biased to the same side at every token, and weights below the head sum over tokens.

**Tolerance.** The mean square error of dX is at most Σ w·τ over the small pairs, times max‖W_v‖². Rounding
the logit gradient to bfloat16, as a dense backward does, costs at least ρ²·Σ_i (Σ_v|G_iv| / 2)² of the same,
because the target's entry is as large as all others of its row together. τ is the largest value with

    τ·Σ_{w<τ} w  ≤  PAIR_BUDGET·(tolerance·ρ)²·Σ_i (Σ_v|G_iv| / 2)²

One τ for the batch keeps the fewest pairs for the error. If few rows have most of the gradient, that would
keep almost no pairs, so τ is bounded by what keeps LEAST_DENSITY of them. The entries of dX (`sparse_rows`)
use the rest of the tolerance. τ is read from a histogram in quarter octaves relative to the batch's norm, so
that it does not depend on the gradient's scale.

**Sampling** is stratified. The small pairs of a row are intervals of length w/τ, side by side on a line. Each
unit of the line, a *stratum*, has one uniform point, and a pair is kept as often as it contains points. A row
keeps at most one pair more than its Σ w/τ, with less variance than independent draws. Random numbers are
hashes of the row's log-sum-exp, its position and a salt (`hashing`), so a resumed run draws the same. The
salt is a hash of the seed and of all rows' log-sum-exps, targets and upstream gradients: draws are
independent between rows, and between batches that differ anywhere or in their seed.

Rows without an upstream gradient have no pairs. A row that is not finite keeps all of its pairs, so that NaN
reaches its gradient. There is no host synchronization, and every list is in ascending order: results are
bit-equal from run to run.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BF16_ROUNDING, BINS, ENTRY_SHARE, LEAST_DENSITY, PAIR_BUDGET, STRATUM, TILE, cuda
from .coefficients import Masses, RowCoefficients
from .hashing import mix, row_seed, spread
from .product import LOG2E

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall

_BINS = tl.constexpr(BINS)
_STRATUM = tl.constexpr(STRATUM)
_STRATUM_BITS = tl.constexpr(int(math.log2(STRATUM)))
_LOG_TILE = tl.constexpr(math.log(TILE))
_PAIR_BUDGET = tl.constexpr(PAIR_BUDGET)
_BIN = tl.constexpr(2**-0.25)  # a bin's lower edge, of its upper one


class Threshold(NamedTuple):
    """Threshold and salt of a batch."""

    # (4,) float32: log2 τ; τ_e, the threshold of dX's entries; τ in units of the error of rounding; and the
    # largest allowed Σ a/τ_e over the entries a < τ_e of the batch.
    numbers: Tensor
    salt: Tensor  # (1,) uint32


class ActivePairs(NamedTuple):
    """The kept pairs of N rows and T tiles."""

    masses: Masses
    threshold: Threshold
    bits: Tensor  # (ceil(T / 32), N) int32: bit t % 32 of word t // 32
    twice: Tensor  # (ceil(T / 32), N) int32: bits of the tiles that were drawn twice
    rank_base: Tensor  # (ceil(T / 32), N) int32: kept tiles of the row before this word
    count: Tensor  # (N,) int32: kept tiles of the row
    room: Tensor  # (N,) int32: upper bound of `count`
    row_ends: Tensor  # (N,) int64: cumulative sum of `room`
    tile_counts: Tensor  # (T,) int32: rows that keep the tile
    small: Tensor  # (N,) float32: Σ w/τ of the pairs below τ
    largest: Tensor  # (N,) float32: the largest scale of a small pair that was kept


def select_live(call: HeadCall, rows: RowCoefficients, tile_lse: Tensor, *, tolerance: float) -> ActivePairs:
    """Select the pairs of a batch.

    Args:
        tile_lse: (N, T) float32, T at most MOST_TILES, log-sum-exp of each row's logits over each tile; the
            target's tile is not read.
        tolerance: root mean square error allowed, relative to rounding the logit gradient to bfloat16; 0
            keeps all.
    """
    count, tiles = tile_lse.shape
    masses = Masses.of(tile_lse, call.targets, rows, call.vocabulary)
    threshold = choose_threshold(masses, rows, tolerance, call.seed)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return tile_lse.new_empty(shape, dtype=dtype)

    words = -(-tiles // 32)
    live = ActivePairs(
        masses, threshold, empty(words, count), empty(words, count), empty(words, count), empty(count),
        empty(count), empty(count, dtype=torch.int64), empty(tiles), tile_lse.new_empty(count),
        tile_lse.new_empty(count),
    )  # fmt: skip
    if count:
        _mark_live[(count,)](live, count, TILE=TILE, BLOCK=_BLOCK, num_warps=1)
    torch.cumsum(live.room, 0, out=live.row_ends)
    _count_tile[(tiles,)](live.bits, live.tile_counts, count, BLOCK=_SCAN)
    return live


def choose_threshold(masses: Masses, rows: RowCoefficients, tolerance: float, seed: int | None) -> Threshold:
    """Choose τ, and the salt of the draws."""
    word = 0 if seed is None else random.Random(seed).getrandbits(31)  # of one type for Triton
    count = cuda.count_pairs if cuda.usable(masses.tile_lse.device, count_pairs) else count_pairs
    counts = count(masses, rows.squares)
    threshold = Threshold(masses.tile_lse.new_empty(4), rows.salts.new_empty(1, dtype=torch.uint32))
    _choose[(1,)](
        counts, rows.squares, rows.salts, threshold, word,
        (tolerance * BF16_ROUNDING) ** 2, LEAST_DENSITY, ENTRY_SHARE, BF16_ROUNDING, rows.squares.numel(),
        BLOCK=16, num_warps=8,
    )  # fmt: skip
    return threshold


def count_pairs(masses: Masses, squares: Tensor) -> Tensor:
    """Count pairs by w relative to the batch's norm R, (1, BINS) int64, without the targets' tiles.

    Bin k counts w/R from 2^(-k/4) up to 2^((1 - k)/4), the first all above, the last all below.
    """
    count = masses.tile_lse.shape[0]
    counts = masses.tile_lse.new_zeros((1, BINS), dtype=torch.int64)
    if count:
        _count_pairs[(min(count, _PROGRAMS),)](
            masses, squares, counts, count, squares.numel(), TILE=TILE, BLOCK=_BLOCK, num_warps=1
        )
    return counts


_BLOCK = 256  # tiles of a row at a time
_SCAN = 2048
_PROGRAMS = 4096  # of the histogram: as many warps as a large GPU holds


@triton.jit
def log2_weight(tile_lse, logsumexp, mass_gradient, slope, entropy, entropy_gradient):
    """Compute log2 of w, bit-equal in every kernel."""
    behind = tile_lse - logsumexp
    size = tl.abs(mass_gradient)
    if entropy_gradient is not None:
        surprise = tl.where(behind == float("-inf"), 0.0, tl.abs(behind + entropy)) + _LOG_TILE
        size = tl.fma(tl.abs(entropy_gradient), surprise, size)
    return tl.fma(behind, LOG2E, tl.log2(size * slope))


@triton.jit
def draw_length(log2_w, log2_threshold):
    """Compute w over the threshold as int32, in units of 2**-_STRATUM_BITS of a stratum."""
    return tl.ceil(tl.exp2(log2_w - log2_threshold + _STRATUM_BITS)).to(tl.int32)


@triton.jit
def is_certain(log2_w, log2_threshold):
    """Return whether a pair is always kept; NaN is."""
    return ~(log2_w < log2_threshold)


@triton.jit
def _row_weights(
    masses,  # `Masses`
    row,
    start,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return log2 w of BLOCK tiles of a row, which of them are not empty, and which has the target."""
    mass = tl.load(masses.mass + row)
    gradient = tl.abs(tl.load(masses.target + row)) + tl.abs(mass)
    h, e = None, None
    if masses.entropy_gradient is not None:
        h, e = tl.load(masses.entropy + row), tl.load(masses.entropy_gradient + row)
        gradient += tl.abs(e)
    target = tl.load(masses.targets + row)
    target_tile = tl.where((target >= 0) & (target < masses.vocabulary), target // TILE, -1).to(tl.int32)
    tile = start + tl.arange(0, BLOCK)
    inside = tile < tl.where(gradient == 0.0, 0, masses.tiles)  # a row of NaN works
    line = masses.tile_lse + row.to(tl.int64) * masses.row_stride
    lse = tl.load(line + tile, mask=inside, other=float("-inf"))
    log2_w = log2_weight(lse, tl.load(masses.logsumexp + row), mass, tl.load(masses.slope + row), h, e)
    has_target = inside & (tile == target_tile)
    return log2_w, (inside & ~(lse == float("-inf"))) | has_target, has_target


@triton.jit
def _sum(numbers, parts, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Sum (parts,) in a fixed order."""
    total = tl.zeros((BLOCK,), dtype=KIND)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(numbers + part, mask=part < parts, other=0)
    return tl.sum(total)


@triton.jit
def log2_norm(squares, parts, BLOCK: tl.constexpr):
    """Compute half the log2 of the sum of (parts,) float64; far below any other number for a zero sum."""
    bits = _sum(squares, parts, tl.float64, BLOCK).to(tl.int64, bitcast=True)
    fraction = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True).to(tl.float32)
    return 0.5 * (((bits >> 52) - 1023).to(tl.float32) + tl.log2(fraction))


@triton.jit(do_not_specialize=["rows", "parts"])
def _count_pairs(
    masses,  # `Masses`
    squares,  # (parts,) float64
    counts_out,  # (BINS,) int64, added to
    rows,
    parts,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    norm = log2_norm(squares, parts, 16)
    counts = tl.zeros((_BINS,), dtype=tl.int32)
    programs = tl.num_programs(0)
    for turn in range(0, tl.cdiv(rows - tl.program_id(0), programs)):
        row = tl.program_id(0) + turn * programs
        for start in range(0, masses.tiles, BLOCK):
            log2_w, inside, has_target = _row_weights(masses, row, start, TILE, BLOCK)
            octave = tl.floor(-4.0 * (log2_w - norm)) + 1.0
            place = tl.minimum(tl.maximum(octave, 0.0), _BINS - 1).to(tl.int32)
            counts += tl.histogram(place, _BINS, mask=inside & ~has_target & (log2_w > float("-inf")))
    tl.atomic_add(counts_out + tl.arange(0, _BINS), counts.to(tl.int64), mask=counts != 0, sem="relaxed")


@triton.jit(do_not_specialize=["word", "budget", "least_density", "entry_share", "rounding", "parts"])
def _choose(
    counts_in,  # (BINS,) int64
    squares,  # (parts,) float64
    salts,  # (parts,) int64
    threshold_out,  # `Threshold`, written
    word,  # of the seed
    budget,
    least_density,
    entry_share,
    rounding,
    parts,
    BLOCK: tl.constexpr,
):
    """Choose the largest threshold min(e_k, budget / S_k), S_k ≥ Σ w below bin k's upper edge e_k."""
    place = tl.arange(0, _BINS)
    counts = tl.load(counts_in + place)
    edge = tl.exp2(0.25 * (1 - place))
    below = tl.cumsum(counts.to(tl.float32) * edge, axis=0, reverse=True)
    of_pairs = _PAIR_BUDGET * budget
    within = tl.where(of_pairs < edge * below, of_pairs / below, edge)
    number = tl.where(place > 0, counts, 0).to(tl.float32)  # the first bin has one pair at most
    kept = tl.cumsum(number) - number + below / edge  # for τ at the bin's upper edge
    enough = (place > 0) & (kept >= least_density * tl.sum(number))
    threshold = tl.minimum(tl.max(tl.where(place > 0, within, 0.0)), tl.max(tl.where(enough, edge, 0.0)))
    norm = log2_norm(squares, parts, BLOCK)
    log2_threshold = tl.log2(threshold) + norm
    numbers = threshold_out.numbers
    tl.store(numbers, log2_threshold)
    tl.store(numbers + 1, entry_share * tl.exp2(log2_threshold))
    tl.store(numbers + 2, threshold / rounding)
    drawn = (place > 0) & (_BIN * edge < threshold)
    spent = threshold * tl.sum(tl.where(drawn, number * tl.minimum(edge, threshold), 0.0))
    of_entries = budget - tl.minimum(spent, of_pairs)
    tl.store(numbers + 3, of_entries / (entry_share * threshold * entry_share * threshold))
    salt = _sum(salts, parts, tl.int64, BLOCK) + word
    tl.store(threshold_out.salt, (salt & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def _is_hit(start, end, stratum, seed):
    """Return whether an interval of the line contains the stratum's point."""
    point = (stratum << _STRATUM_BITS) + (mix(seed + spread(stratum)) >> (32 - _STRATUM_BITS)).to(tl.int32)
    return (start <= point) & (point < end)


@triton.jit(do_not_specialize=["rows"])
def _mark_live(
    live,  # `ActivePairs`: all but `row_ends` and `tile_counts` is written
    rows,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark the kept tiles of one row, BLOCK tiles at a time."""
    row, masses = tl.program_id(0), live.masses
    log2_threshold = tl.load(live.threshold.numbers)
    seed = row_seed(tl.load(masses.logsumexp + row), row, live.threshold.salt)
    WORDS: tl.constexpr = BLOCK // 32
    shift = tl.arange(0, 32)[None, :]
    line, kept, sure = 0, 0, 0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    shortest = tl.full((BLOCK,), 2 * _STRATUM, tl.int32)
    for begin in range(0, masses.tiles, BLOCK):
        log2_w, inside, has_target = _row_weights(masses, row, begin, TILE, BLOCK)
        certain = inside & (is_certain(log2_w, log2_threshold) | has_target)
        small = inside & ~certain
        length = tl.where(small, draw_length(log2_w, log2_threshold), 0)
        end = line + tl.cumsum(length, axis=0)
        start = end - length
        first, last = start >> _STRATUM_BITS, (end - 1) >> _STRATUM_BITS
        once = _is_hit(start, end, first, seed)
        again = _is_hit(start, end, last, seed) & (last != first)
        drawn = (length > 0) & (once | again)
        twice = drawn & once & again
        total += tl.where(small, tl.exp2(log2_w - log2_threshold), 0.0)
        shortest = tl.minimum(shortest, tl.where(drawn, tl.where(twice, length, 2 * length), 2 * _STRATUM))
        line += tl.sum(length)
        sure += tl.sum(certain.to(tl.int32))

        bit = tl.reshape((certain | drawn).to(tl.int32), (WORDS, 32))
        in_word = tl.sum(bit, axis=1)
        word = begin // 32 + tl.arange(0, WORDS)
        stored = word < tl.cdiv(masses.tiles, 32)
        place = word.to(tl.int64) * rows + row
        tl.store(live.bits + place, tl.sum(bit << shift, axis=1), mask=stored)
        both = tl.reshape(twice.to(tl.int32), (WORDS, 32))
        tl.store(live.twice + place, tl.sum(both << shift, axis=1), mask=stored)
        tl.store(live.rank_base + place, kept + tl.cumsum(in_word, axis=0) - in_word, mask=stored)
        kept += tl.sum(in_word)
    tl.store(live.count + row, kept)
    tl.store(live.room + row, sure + tl.cdiv(line, _STRATUM))
    tl.store(live.small + row, tl.sum(total))
    tl.store(live.largest + row, 1.0 / tl.min(shortest) * (2 * _STRATUM))


@triton.jit
def word_of_tile(bits, tile, row, rows):
    """Load the rows' words that contain the tile's bit."""
    return tl.load(bits + (tile // 32).to(tl.int64) * rows + row, mask=row < rows, other=0)


@triton.jit(do_not_specialize=["rows"])
def _count_tile(bits, tile_counts, rows, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    live = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        live += (word_of_tile(bits, tile, start + tl.arange(0, BLOCK), rows) >> (tile % 32)) & 1
    tl.store(tile_counts + tile, tl.sum(live))
