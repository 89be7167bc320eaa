"""How much each row may leave out, so that the batch's certificate holds at the least cost.

Row i, told to leave out whatever is below a threshold θ, leaves out the mass μ_i(θ). Minimising what is
kept under

    Σ_i (c_i·μ_i)² ≤ B²

gives every row its own threshold, where  c_i²·θ_i·μ_i(θ_i) = κ  with one κ for the batch: the last thing left
out saves one visit and costs 2·c_i²·μ_i·θ_i of the budget, the same in every row. The thresholds are half
octaves, so a row's μ_i is a short table (its *curve*); κ is the largest half octave at which the budget
holds, found on the device. Where less than θ lies below θ it counts as θ: a row with an empty tail is not
given a wild threshold.

A curve is a histogram: what lies in each quarter octave is counted and taken for the octave's upper edge. So
it is an upper bound, loose by at most 2^(1/4) = 19 %, and the budget holds; what is left out in the end is
summed exactly where it is left out. Triton has no histogram that sums; the tiles' curve has one where `csrc/`
was built.

The same balance is struck twice: over the masses of vocabulary tiles (`select`), and over the single
entries of the hidden gradient (`sparse_rows`), whose curves start at what is already left out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import BINS, CANDIDATES, LEVELS

_BINS = tl.constexpr(BINS)
_LEVELS = tl.constexpr(LEVELS)
_CANDIDATES = tl.constexpr(CANDIDATES)
_BLOCK_LEVELS = tl.constexpr(triton.next_power_of_2(LEVELS))
_BLOCK_ROWS = 64


@triton.jit
def octave(log2_mass):
    """Quarter octaves from 2^-4 down to a mass, int32 up to BINS; 0: not below 2^-4."""
    return tl.minimum(tl.maximum(tl.ceil(-4.0 * log2_mass - 16.0), 0.0), _BINS).to(tl.int32)


@triton.jit
def is_below(log2_mass, level):
    """Whether a mass is less than the threshold 2^-(4 + level/2), at the last level zero. NaN is not."""
    passed = tl.minimum((octave(log2_mass) + 1) // 2, _LEVELS - 1) > level
    return (passed | (tl.exp2(log2_mass) == 0.0)) & (log2_mass == log2_mass)


@triton.jit
def threshold_of(level):
    """Of a level; an ulp or two less than where `octave` ends, so that what is below it has been counted."""
    return tl.where(level < _LEVELS - 1, tl.exp2(-4.0 - 0.5 * level.to(tl.float32)) * (1 - 2.0**-20), 1e-38)


@triton.jit
def count_octaves(log2_mass, counted):
    """(BINS,) int32: how many of the masses that count lie in each quarter octave below 2^-4."""
    place = octave(log2_mass)
    counted &= (place > 0) & (log2_mass > float("-inf"))
    return tl.histogram(tl.where(counted, place - 1, 0), _BINS, mask=counted)


@triton.jit
def store_curve(curve, row, counts, so_far, FACTOR: tl.constexpr):
    """Writes a row's curve: `so_far`, and what the counts (BINS,) below each level amount to at most."""
    edge = tl.exp2(-4.0 - 0.25 * tl.arange(0, _BINS).to(tl.float32))
    of_level = tl.sum(tl.reshape(counts.to(tl.float32) * edge, (_BINS // 2, 2)), axis=1)
    below = so_far + FACTOR * tl.cumsum(of_level, axis=0, reverse=True)
    level = tl.arange(0, _BINS // 2)
    below = tl.where(level < _LEVELS - 1, below, so_far)
    tl.store(curve + row.to(tl.int64) * _LEVELS + level, below, mask=level < _LEVELS)


@triton.jit
def level_of(curve, row, c, kappa):
    """The first level of a row, int32, whose cost is within κ."""
    level = tl.arange(0, _BLOCK_LEVELS)
    place = curve + row.to(tl.int64) * _LEVELS + level
    mass = tl.load(place, mask=level < _LEVELS, other=float("inf"))
    _, cost = _costs(mass, level, c)
    return tl.min(tl.where(cost <= kappa, level, _LEVELS - 1), axis=0)


@triton.jit
def _costs(mass, level, c):
    """What is left out as it counts, and c²·θ·μ of it; infinite past the last level, zero there."""
    theta = tl.where(level < _LEVELS - 1, tl.exp2(-4.0 - 0.5 * level.to(tl.float32)), 0.0)
    counted = tl.maximum(mass, theta, propagate_nan=tl.PropagateNan.ALL)
    cost = c * c * theta * counted
    # What compares with nothing, a row of NaN, keeps the last level alone.
    cost = tl.where((level < _LEVELS) & (cost == cost), cost, float("inf"))
    return counted, tl.where(level == _LEVELS - 1, 0.0, cost)


def balance(curve: Tensor, c: Tensor, squares: Tensor, share: float) -> Tensor:
    """κ, (1,) float32: with the thresholds of `level_of`, Σ (c·left_out)² is within the budget.

    Args:
        curve: (N, LEVELS) float32: mass left out below each level; the last is what is left out in any case.
        c: (N,) float32. A row of NaN leaves out nothing and is not counted.
        squares: (P,) float32 that sum to the square of the batch's gradient norm.
        share: of that norm, the budget B.
    """
    programs = triton.cdiv(c.numel(), _BLOCK_ROWS)
    partial, kappa = (curve.new_empty(size) for size in ((programs, CANDIDATES), 1))
    if programs:
        _spend[(programs,)](
            curve, c, squares, partial, share**2, c.numel(), squares.numel(), BLOCK=_BLOCK_ROWS
        )
    _choose[(1,)](partial, squares, kappa, share**2, programs, squares.numel(), BLOCK=32)
    return kappa


@triton.jit
def total_of(squares, parts, BLOCK: tl.constexpr):
    """Sum of (parts,) float32, in a fixed order."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(squares + part, mask=part < parts, other=0.0)
    return tl.sum(total)


@triton.jit
def _candidate(budget, candidate):
    """κ falls by half octaves; the last is zero."""
    return tl.where(candidate < _CANDIDATES - 1, budget * tl.exp2(-0.5 * candidate), 0.0)


@triton.jit(do_not_specialize=["factor", "rows", "parts"])
def _spend(
    curve,
    c,
    squares,
    partial,  # (programs, CANDIDATES) float32, written: Σ (c·μ)² of the program's rows for every κ
    factor,
    rows,
    parts,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    level = tl.arange(0, _BLOCK_LEVELS)
    inside = (row < rows)[:, None] & (level < _LEVELS)[None, :]
    mass = tl.load(curve + row.to(tl.int64)[:, None] * _LEVELS + level[None, :], mask=inside, other=0.0)
    weight = tl.load(c + row, mask=row < rows, other=0.0)
    counted, cost = _costs(mass, level[None, :], weight[:, None])
    budget = factor * total_of(squares, parts, BLOCK)
    for candidate in range(_CANDIDATES):
        kappa = _candidate(budget, candidate)
        # Curves descend: the largest mass whose cost fits is that of the first level that fits.
        spent = weight * tl.max(tl.where(cost <= kappa, counted, 0.0), axis=1)
        spent = tl.where(spent == spent, spent * spent, 0.0)
        tl.store(partial + tl.program_id(0) * _CANDIDATES + candidate, tl.sum(spent))


@triton.jit(do_not_specialize=["factor", "programs", "parts"])
def _choose(partial, squares, kappa, factor, programs, parts, BLOCK: tl.constexpr):
    """The largest κ whose spending is within the budget; zero leaves out nothing more, and always is."""
    candidate = tl.arange(0, _CANDIDATES)
    spent = tl.zeros((_CANDIDATES,), dtype=tl.float32)
    for first in range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        place = program[:, None] * _CANDIDATES + candidate[None, :]
        spent += tl.sum(tl.load(partial + place, mask=(program < programs)[:, None], other=0.0), axis=0)
    budget = factor * total_of(squares, parts, BLOCK)
    fitting = tl.min(tl.where(spent <= budget, candidate, _CANDIDATES - 1))
    tl.store(kappa, _candidate(budget, fitting))
