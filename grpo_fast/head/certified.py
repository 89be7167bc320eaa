"""The certified backward in plain torch: what the kernels leave out, left out.

Where no kernel runs it saves no time. It shows what a tolerance does to a training run on any device, and is
the second oracle of the kernels' tests. The rules and their reasons are those of `kernels/select.py`,
`kernels/balance.py` and `kernels/sparse_rows.py`, said here once more as plainly as they can be; nothing is
rounded to half precision on the way. Rows are worked on a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.head.problem import (
    HeadGradients,
    HeadProblem,
    LogitGradient,
    RowGradients,
    RowStatistics,
    Wanted,
)
from grpo_fast.head.reference import logits, product_gradient, scattered
from grpo_fast.kernels import BF16_ROUNDING, CANDIDATES, EMIT_SHARE, LEVELS, PAIR_SHARE, TILE

_BLOCK_BYTES = 64 << 20


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    tolerance: float,
) -> tuple[HeadGradients, dict[str, Tensor]]:
    """Gradients through the log-probability and the log-sum-exp, and the certificate's numbers.

    Args:
        gradients: none through the entropy or the mean logit, which are not sparse.
    """
    rows = LogitGradient.of(problem, statistics, gradients)
    index = rows.live().nonzero().squeeze(1)
    live, rows = problem.rows(index), rows.rows(index)
    # What rounding the logit gradient to bfloat16 may cost; a row of NaN is not counted.
    sizes = rows.target.abs() + rows.mass.abs() * -statistics.logprob[index].expm1()
    unit = BF16_ROUNDING * sizes.nan_to_num(nan=0.0).square().sum().sqrt()
    budget, levels = tolerance * unit, _levels(rows.mass)

    def balanced(curve: Callable[[_Block], Tensor], budget: Tensor) -> _Balance:
        curves = [curve(block) for block in _blocks(live, rows)]
        whole = torch.cat(curves, 1) if curves else levels.new_zeros(LEVELS, 0)
        return _balance(whole, levels, rows.mass.abs(), budget)

    pairs = entries = balanced(
        lambda b: _left_out_below(b.tile_mass.where(~b.target_tile, 0), levels), PAIR_SHARE * budget
    )
    if wanted.hidden:
        entries = balanced(lambda b: _entry_curve(b, pairs, levels), budget)

    def zeros(want: bool, *shape: int) -> Tensor | None:
        return levels.new_zeros(shape) if want else None

    of_hidden = zeros(wanted.hidden, *live.hidden.shape)
    of_weight = zeros(wanted.weight, *problem.weight.shape)
    of_bias = zeros(wanted.bias, problem.vocabulary)
    weight, visited = problem.weight.to(levels.dtype), levels.new_zeros(())
    for block in _blocks(live, rows):
        visited_tiles = block.visited(pairs)
        kept = block.gradient.where(_over_columns(visited_tiles, problem.vocabulary), 0)
        visited += visited_tiles.sum()
        if of_weight is not None:
            of_weight.addmm_(kept.t(), block.hidden)
        if of_bias is not None:
            of_bias += kept.sum(0)
        if of_hidden is not None:
            least = torch.maximum(entries.threshold, EMIT_SHARE * pairs.threshold)[block.part, None]
            small = ~block.target & (block.share < least)
            of_hidden[block.part] = (block.gradient if entries.unmet else kept.where(~small, 0)) @ weight
    left_out = entries.left_out
    if entries.unmet:
        left_out = pairs.left_out if wanted.weight or wanted.bias else torch.zeros_like(left_out)
    if of_weight is not None:
        into = wanted.into_weight
        of_weight = of_weight.to(problem.weight.dtype) if into is None else into.add_(of_weight)
    found = HeadGradients(
        None if of_hidden is None else scattered(of_hidden, index, problem.hidden),
        of_weight,
        of_bias if of_bias is None or problem.bias is None else of_bias.to(problem.bias.dtype),
    )
    error = (rows.mass * left_out).nan_to_num().square().sum().sqrt()
    tiles = -(-problem.vocabulary // TILE)
    return found, {
        "density": visited / max(problem.targets.numel() * tiles, 1),
        "left_out_mean": left_out.sum() / max(left_out.numel(), 1),
        "left_out_max": left_out.max() if left_out.numel() else left_out.sum(),
        "error_bound": torch.where(error > 0, error / unit, 0.0),
    }


class _Balance(NamedTuple):
    """Per live row what may be left out, (n,); `unmet`: even nothing is too much."""

    threshold: Tensor
    left_out: Tensor
    unmet: bool


class _Block(NamedTuple):
    """A few rows, b, over the whole vocabulary: V entries in T tiles."""

    part: slice  # of the live rows
    hidden: Tensor  # (b, H) in the accumulator's dtype
    gradient: Tensor  # (b, V) dL/d(x·w + bias)
    share: Tensor  # (b, V) the same, as a probability
    target: Tensor  # (b, V) bool
    tile_mass: Tensor  # (b, T) probability
    target_tile: Tensor  # (b, T) bool

    def visited(self, pairs: _Balance) -> Tensor:
        """(b, T) bool. A tile of NaN is visited, so that it reaches the gradient."""
        below = (self.tile_mass < pairs.threshold[self.part, None]) | (self.tile_mass == 0)
        return ~below | self.target_tile


def _blocks(problem: HeadProblem, rows: LogitGradient) -> Iterator[_Block]:
    vocabulary, kind = problem.vocabulary, problem.accumulator
    height = max(1, _BLOCK_BYTES // (vocabulary * kind.itemsize))
    everything = slice(0, vocabulary)
    for start in range(0, problem.hidden.shape[0], height):
        part = slice(start, start + height)
        block, of_block = problem.rows(part), rows.rows(part)
        p = (logits(block, everything) - of_block.logsumexp[:, None]).exp_()
        gradient = product_gradient(block, of_block, everything)
        scale = of_block.mass.abs() * block.logit_scale
        if block.inv_temperature is not None:
            scale = scale * block.inv_temperature.to(kind)
        targets = block.targets[:, None]
        tiles = torch.arange(-(-vocabulary // TILE), device=targets.device)
        yield _Block(
            part, block.hidden.to(kind), gradient,
            share=torch.where(scale[:, None] == 0, 0, gradient.abs() / scale[:, None]),
            target=torch.arange(vocabulary, device=targets.device) == targets,
            tile_mass=F.pad(p, (0, -vocabulary % TILE)).unflatten(1, (-1, TILE)).sum(2),
            target_tile=(tiles == targets // TILE) & (targets < vocabulary),
        )  # fmt: skip


def _levels(like: Tensor) -> Tensor:
    """(LEVELS,) thresholds, descending to zero."""
    halves = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.where(halves < LEVELS - 1, torch.exp(-(4 + 0.5 * halves) * log(2)), 0)


def _left_out_below(masses: Tensor, levels: Tensor) -> Tensor:
    """(LEVELS, b): the sum of a row's masses, (b, K), below each level."""
    bucket = torch.bucketize(masses, levels.flip(0), right=True)
    sums = masses.new_zeros(masses.shape[0], LEVELS + 1).scatter_add_(1, bucket, masses)
    return sums[:, :LEVELS].cumsum(1).flip(1).t()


def _entry_curve(block: _Block, pairs: _Balance, levels: Tensor) -> Tensor:
    """(LEVELS, b): what whole pairs leave out, what is not emitted, and the emitted entries below."""
    visited = _over_columns(block.visited(pairs), block.share.shape[1])
    share = block.share.where(visited & ~block.target, 0)
    quiet = share < EMIT_SHARE * pairs.threshold[block.part, None]
    behind = pairs.left_out[block.part] + share.where(quiet, 0).sum(1)
    return behind + _left_out_below(share.where(~quiet, 0), levels)


def _balance(curve: Tensor, levels: Tensor, weight: Tensor, budget: Tensor) -> _Balance:
    """Per row the level, of (LEVELS, n) masses below each, that keeps Σ (weight·left_out)² within budget²."""
    counted = torch.maximum(curve, levels[:, None])
    cost = (weight.square() * levels[:, None] * counted).nan_to_num(nan=torch.inf)
    cost[-1] = 0
    for candidate in range(CANDIDATES):
        kappa = budget.square() * 2 ** (-0.5 * candidate) if candidate < CANDIDATES - 1 else 0
        chosen = (cost <= kappa).int().argmax(0)  # the first
        spent = (weight * counted.gather(0, chosen[None])[0]).square().nansum()
        if spent <= budget.square():
            break
    left_out = curve.gather(0, chosen[None])[0]
    return _Balance(levels[chosen], left_out, unmet=bool(spent > budget.square()))


def _over_columns(of_tiles: Tensor, vocabulary: int) -> Tensor:
    """(b, T) -> (b, V)."""
    return of_tiles.repeat_interleave(TILE, 1)[:, :vocabulary]
