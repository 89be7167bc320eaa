"""Fold the mass tiles of every row, and its target, into the row's results.

The target is added last: with M the largest tile_lse of the others, z the target's logit and
Σ = Σ_k exp(tile_lse_k - M),

    log p = -log(1 + Σ·exp(M - z))        margin = (M - z) + log Σ

keeps its digits down to the smallest float32, whereas z - lse has lost them all at a margin of 14 nats.
Statistics per tile are relative to the tile, so that nothing cancels when the logits are large: with
P_k = exp(tile_lse_k - lse), the row's entropy is Σ_k P_k (entropy_k + lse - tile_lse_k) - p·log p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .product import LOG2E, register_bound

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall

    from .forward import TileStatistics


@triton.jit
def exp_of_difference(a, b):
    """Compute exp(a - b) to a few ulps: at 80 nats, rounding a - b alone would cost millionths."""
    difference = a - b
    back = difference - a
    lost = (a - (difference - back)) - (b + back)
    finite = tl.abs(difference) < 200.0
    lost = tl.where(finite, lost, 0.0)
    difference = tl.where(difference < -200.0, -200.0, difference)  # beyond float32; a NaN stays one
    difference = tl.where(difference > 200.0, 200.0, difference)
    octaves = tl.floor(difference * LOG2E + 0.5)
    # ln 2 in two parts, the first of so few bits that its multiples are exact.
    rest = (difference - octaves * 0.693359375) + octaves * 2.12194440e-4 + lost
    return tl.exp2(octaves) * tl.exp(rest)


@triton.jit
def log1p(x):
    """Compute log(1 + x) for x in [0, 1] by the series of atanh, to all digits of a small x."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = 1.0 / 15
    series = series * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    return 2.0 * ratio + 2.0 * ratio * square * series


@triton.jit(do_not_specialize=["rows", "vocabulary", "tiles"])
def finalize_kernel(
    of_tiles,  # `TileStatistics`, without the target but in the total
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
        lse = tl.load(of_tiles.lse + line + tile[None, :], mask=read, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(lse, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(maximum - base) + tl.sum(tl.exp(lse - base[:, None]), axis=1)
        maximum = higher

    here = live & (target < vocabulary)
    target_logit = tl.load(target_in + row, mask=here, other=float("-inf"))
    margin = (maximum - target_logit) + tl.log(mass)
    unlikely = margin > 0
    odds = tl.where(unlikely, tl.exp(-margin), mass * exp_of_difference(maximum, target_logit))
    logprob = -(tl.where(unlikely, margin, 0.0) + log1p(odds))
    highest = tl.maximum(maximum, target_logit)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    lse = base + tl.log(mass * tl.exp(maximum - base) + tl.exp(target_logit - base))
    tl.store(lse_out + row, tl.where(live, lse, 0.0), mask=inside)
    tl.store(logprob_out + row, tl.where(here, logprob, 0.0), mask=inside)

    wants_more = of_tiles.entropy is not None or of_tiles.total is not None
    if wants_more or of_tiles.maximum is not None or of_tiles.squares is not None:
        zero = tl.zeros((ROWS,), tl.float32)
        entropy = zero
        total = zero
        squares = zero
        highest = target_logit
        for first in range(0, tiles, TILES):
            tile = first + tl.arange(0, TILES)
            at = line + tile[None, :]
            read = live[:, None] & (tile < tiles)[None, :]
            behind = tl.load(of_tiles.lse + at, mask=read, other=float("-inf")) - lse[:, None]
            share = tl.exp(behind)
            if of_tiles.entropy is not None:
                within = tl.load(of_tiles.entropy + at, mask=read, other=0.0)
                entropy += tl.sum(tl.where(share > 0, share * (within - behind), 0.0), axis=1)
            if of_tiles.total is not None:
                total += tl.sum(tl.load(of_tiles.total + at, mask=read, other=0.0), axis=1)
            if of_tiles.maximum is not None:
                highest_here = tl.max(tl.load(of_tiles.maximum + at, mask=read, other=float("-inf")), axis=1)
                highest = tl.maximum(highest, highest_here)
            if of_tiles.squares is not None:
                within = tl.load(of_tiles.squares + at, mask=read, other=0.0)
                squares += tl.sum(tl.where(share > 0, share * share * tl.exp(within), 0.0), axis=1)
        p = tl.where(here, tl.exp(logprob), 0.0)
        if of_tiles.entropy is not None:
            entropy += tl.where(p > 0, -p * logprob, 0.0)
            tl.store(entropy_out + row, tl.where(live, entropy, 0.0), mask=inside)
        if of_tiles.total is not None:
            tl.store(mean_out + row, total / vocabulary, mask=inside)
        if of_tiles.maximum is not None:
            # Equal logits of two products may differ in their last digits.
            nearly = highest - target_logit <= 4e-6 * (1.0 + tl.abs(highest))
            highest = tl.where(here & nearly, target_logit, highest)
            tl.store(maximum_out + row, tl.where(live, highest, 0.0), mask=inside)
            tl.store(target_out + row, tl.where(here, target_logit, 0.0), mask=inside)
        if of_tiles.squares is not None:
            tl.store(squares_out + row, tl.where(live, tl.log(squares + p * p), 0.0), mask=inside)


def row_results(tiles: TileStatistics, call: HeadCall, target_logit: Tensor) -> tuple[Tensor, ...]:
    """Fold the tiles into per-row results.

    Args:
        target_logit: (N,) float32, of `gather_rows`.

    Returns:
        (N,) float32 each: log-probability, log-sum-exp, entropy, mean logit, largest logit, target's logit,
        log Σ p²; zero in ignored rows, (0,) for statistics that the tiles do not have.
    """
    rows = call.targets.numel()
    of = (tiles.lse, tiles.lse, tiles.entropy, tiles.total, tiles.maximum, tiles.maximum, tiles.squares)
    results = tuple(tiles.lse.new_empty(0 if part is None else rows) for part in of)
    finalize_kernel[(triton.cdiv(rows, _ROWS),)](
        tiles, target_logit, call.targets, *results, tiles.lse.stride(0), rows, call.vocabulary,
        tiles.lse.shape[1], ROWS=_ROWS, TILES=_TILES, num_warps=8, **register_bound(128),
    )  # fmt: skip
    return results


_ROWS = 4
_TILES = 256
