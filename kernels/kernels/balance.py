"""How much each row may leave out, so that the batch's certificate holds at the least cost.

Row i, told to leave out whatever is below a threshold θ, leaves out the mass μ_i(θ). Minimising what is
kept under

    Σ_i (c_i·μ_i)² ≤ B²

gives every row its own threshold, where  c_i²·θ_i·μ_i(θ_i) = κ  with one κ for the batch: the last thing left
out saves one visit and costs 2·c_i²·μ_i·θ_i of the budget, the same in every row. The thresholds are half
octaves, so a row's μ_i is a short table (its *curve*), summed exactly; κ is the largest half octave at
which the budget holds, found on the device. Where less than θ lies below θ it counts as θ: a row with an
empty tail is not given a wild threshold.

The same balance is struck twice: over the masses of vocabulary tiles (`select`), and over the single
entries of the hidden gradient (`sparse_rows`), whose curves start at what is already left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import CANDIDATES, LEVELS

_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Balance:
    """Per row (N,) float32, what to leave out and how much that is; `unmet` (1,) int32: over budget."""

    log_threshold: Tensor  # natural log; -inf: leave out nothing more
    left_out: Tensor
    unmet: Tensor


def log_levels(device: torch.device) -> Tensor:
    """(LEVELS,) float32, descending to -inf."""
    levels = torch.arange(LEVELS, dtype=torch.float32, device=device)
    return torch.where(levels < LEVELS - 1, -(4 + 0.5 * levels) * math.log(2), -torch.inf)


def balance(curve: Tensor, levels: Tensor, weight: Tensor, budget: Tensor) -> Balance:
    """Thresholds that keep Σ (weight·left_out)² within `budget`.

    Args:
        curve: (LEVELS, N) float32: mass left out below each level; the last row is what is left out in any
            case.
        levels: from `log_levels`.
        weight: (N,) float32, c. A row of NaN leaves out nothing and is not counted.
        budget: () float32, B².
    """
    rows = weight.numel()
    programs = triton.cdiv(rows, _BLOCK_ROWS)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=curve.device)

    partial, kappa, unmet = empty(max(programs, 1), CANDIDATES), empty(1), empty(1, dtype=torch.int32)
    log_threshold, left_out = empty(rows), empty(rows)
    shape = {"LEVELS": LEVELS, "BLOCK_LEVELS": triton.next_power_of_2(LEVELS), "BLOCK": _BLOCK_ROWS}
    if programs:
        _spend[(programs,)](curve, levels, weight, budget, partial, rows, CANDIDATES=CANDIDATES, **shape)
    _choose[(1,)](partial, budget, kappa, unmet, programs, CANDIDATES=CANDIDATES, BLOCK=32)
    if programs:
        _assign[(programs,)](curve, levels, weight, kappa, log_threshold, left_out, rows, **shape)
    return Balance(log_threshold, left_out, unmet)


@triton.jit
def _load_costs(
    curve, levels, weight, rows, LEVELS: tl.constexpr, BLOCK_LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Curves of a block of rows, (BLOCK_LEVELS, BLOCK), and c²·θ·μ, infinite past the end; rows; c."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    level = tl.arange(0, BLOCK_LEVELS)
    inside = (level < LEVELS)[:, None] & (row < rows)[None, :]
    mass = tl.load(curve + level[:, None].to(tl.int64) * rows + row[None, :], mask=inside, other=0.0)
    theta = tl.exp(tl.load(levels + level, mask=level < LEVELS, other=0.0))
    c = tl.load(weight + row, mask=row < rows, other=0.0)
    counted = tl.maximum(mass, theta[:, None], propagate_nan=tl.PropagateNan.ALL)
    cost = (c * c)[None, :] * theta[:, None] * counted
    # What compares with nothing, a row of NaN, keeps the last level alone.
    cost = tl.where(level[:, None] == LEVELS - 1, 0.0, tl.where(inside & (cost == cost), cost, float("inf")))
    return mass, counted, cost, row, c


@triton.jit(do_not_specialize=["rows"])
def _spend(
    curve,
    levels,
    weight,
    budget,  # () float32
    partial,  # (programs, CANDIDATES) float32, written: Σ (c·μ)² of the program's rows for every κ
    rows,
    CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, counted, cost, _, c = _load_costs(curve, levels, weight, rows, LEVELS, BLOCK_LEVELS, BLOCK)
    total = tl.load(budget)
    for candidate in range(CANDIDATES):
        kappa = _candidate(total, candidate, CANDIDATES)
        # Curves descend: the largest mass whose cost fits is that of the first level that fits.
        spent = c * tl.max(tl.where(cost <= kappa, counted, 0.0), axis=0)
        spent = tl.where(spent == spent, spent * spent, 0.0)
        tl.store(partial + tl.program_id(0) * CANDIDATES + candidate, tl.sum(spent))


@triton.jit
def _candidate(budget, candidate, CANDIDATES: tl.constexpr):
    """κ falls by half octaves; the last is zero."""
    return tl.where(candidate < CANDIDATES - 1, budget * tl.exp2(-0.5 * candidate), 0.0)


@triton.jit(do_not_specialize=["programs"])
def _choose(partial, budget, kappa, unmet, programs, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """The largest κ whose spending is within the budget."""
    candidate = tl.arange(0, CANDIDATES)
    spent = tl.zeros((CANDIDATES,), dtype=tl.float32)
    for first in range(0, programs, BLOCK):
        program = first + tl.arange(0, BLOCK)
        place = program[:, None] * CANDIDATES + candidate[None, :]
        spent += tl.sum(tl.load(partial + place, mask=(program < programs)[:, None], other=0.0), axis=0)
    total = tl.load(budget)
    fitting = tl.min(tl.where(spent <= total, candidate, CANDIDATES))
    tl.store(kappa, _candidate(total, tl.minimum(fitting, CANDIDATES - 1), CANDIDATES))
    tl.store(unmet, (fitting == CANDIDATES).to(tl.int32))


@triton.jit(do_not_specialize=["rows"])
def _assign(
    curve,
    levels,
    weight,
    kappa,  # (1,) float32
    log_threshold,  # (N,) float32, written
    left_out,  # (N,) float32, written
    rows,
    LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mass, _, cost, row, _ = _load_costs(curve, levels, weight, rows, LEVELS, BLOCK_LEVELS, BLOCK)
    level = tl.arange(0, BLOCK_LEVELS)[:, None]
    chosen = tl.min(tl.where(cost <= tl.load(kappa), level, LEVELS - 1), axis=0)
    tl.store(log_threshold + row, tl.load(levels + chosen), mask=row < rows)
    tl.store(left_out + row, tl.sum(tl.where(level == chosen[None, :], mass, 0.0), axis=0), mask=row < rows)
