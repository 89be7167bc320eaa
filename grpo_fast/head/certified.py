"""What the kernels would leave out of a backward, left out in plain torch.

Where no kernel runs it saves no time. It shows what a tolerance does to a training run on any device, and is
the second oracle of the kernels' tests. The rules and their reasons are those of `kernels/select.py`,
`kernels/balance.py` and `kernels/sparse_rows.py`; nothing is rounded to half precision on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.head.plan import Chunks
from grpo_fast.head.problem import HeadProblem, LogitGradient, Wanted
from grpo_fast.kernels import BF16_ROUNDING, BINS, CANDIDATES, LEVELS, PAIR_SHARE, TILE


@dataclass(frozen=True)
class Balance:
    """Per row below which level to leave out, (n,) int64, and what that leaves out, (n,)."""

    level: Tensor
    left_out: Tensor


@dataclass(frozen=True)
class Selection:
    """What the gradients of n rows over T tiles leave out: whole tiles, and dX single entries besides."""

    rows: LogitGradient
    targets: Tensor  # (n,)
    scale: Tensor  # (n,) |dL/d(x·w)| per probability
    visited: Tensor  # (n, T) bool
    entries: Balance  # of the entries in visited tiles; it leaves out what the others do, too
    unit: Tensor  # () the certified error of rounding the logit gradient to bfloat16

    def kept(self, gradient: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Of the logit gradient (b, w) of some rows and columns, what goes into dW, and what into dX."""
        of_pairs = gradient.where(self._over(part, columns), 0)
        is_target, share = self._shares(gradient, part, columns)
        return of_pairs, of_pairs.where(is_target | ~_is_below(share, self.entries.level[part, None]), 0)

    def metrics(self, density_of: int) -> Tensor:
        """The certificate's numbers, (4,); `density_of`: all pairs, those of other rows among them."""
        left_out = self.entries.left_out
        error = (self.rows.mass * left_out).nan_to_num().square().sum().sqrt()
        numbers = (
            self.visited.sum() / max(density_of, 1),
            left_out.sum() / max(left_out.numel(), 1),
            left_out.max() if left_out.numel() else left_out.sum(),
            torch.where(error > 0, error / self.unit, 0.0),
        )
        return torch.stack([number.float() for number in numbers])

    def shares(self, gradient: Tensor, part: slice, columns: slice) -> Tensor:
        """(b, w): the probability that an entry of a visited tile counts as; the target's does not."""
        is_target, share = self._shares(gradient, part, columns)
        return share.where(self._over(part, columns) & ~is_target, 0)

    def _over(self, part: slice, columns: slice) -> Tensor:
        """(b, w) bool: in a visited tile."""
        visited = self.visited[part, _tiles(columns)].repeat_interleave(TILE, 1)
        return visited[:, : columns.stop - columns.start]

    def _shares(self, gradient: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """(b, w): where the target is, and the probability that an entry counts as."""
        vocabulary = torch.arange(columns.start, columns.stop, device=gradient.device)
        scale = self.scale[part, None]
        share = torch.where(scale == 0, 0, gradient.abs() / scale)
        return vocabulary == self.targets[part, None], share


def select(
    problem: HeadProblem,
    rows: LogitGradient,
    wanted: Wanted,
    tolerance: float,
    chunks: Chunks,
) -> Selection:
    """For gradients through the log-probability and the log-sum-exp; others are not sparse."""
    targets, count = problem.targets, problem.targets.numel()
    blocks = list(product(chunks.of_rows(count), chunks.of_columns(problem.vocabulary)))
    # A row of NaN is not counted.
    sizes = rows.target.abs() + rows.mass.abs() * -rows.logprob.expm1()
    unit = BF16_ROUNDING * sizes.nan_to_num(nan=0.0).square().sum().sqrt()
    tile = torch.arange(-(-problem.vocabulary // TILE), device=targets.device)
    mass = rows.mass.new_empty(count, tile.numel())
    for part, columns in blocks:
        p = (problem.rows(part).logits(columns) - rows.logsumexp[part, None]).exp_()
        mass[part, _tiles(columns)] = F.pad(p, (0, -p.shape[1] % TILE)).unflatten(1, (-1, TILE)).sum(2)
    has_target = (tile == targets[:, None] // TILE) & (targets < problem.vocabulary)[:, None]
    level = balance(_curve(mass.where(~has_target, 0)), rows.mass.abs(), PAIR_SHARE * tolerance * unit)
    visited = has_target | ~_is_below(mass, level[:, None])
    left_out = mass.where(~visited, 0).sum(1)
    scale = rows.mass.abs() * problem.logit_scale
    if problem.inv_temperature is not None:
        scale = scale * problem.inv_temperature.to(scale.dtype)
    selection = Selection(rows, targets, scale, visited, Balance(level, left_out), unit)
    if not wanted.hidden:
        return selection

    def of_blocks(numbers: Callable[[Tensor, slice], Tensor], total: Tensor) -> Tensor:
        for part, columns in blocks:
            gradient = rows.rows(part).of_products(problem.rows(part), columns)
            total[part] += numbers(selection.shares(gradient, part, columns), part)
        return total

    curve = of_blocks(lambda share, _: _curve(share), left_out[:, None].repeat(1, LEVELS))
    level = balance(curve, rows.mass.abs(), tolerance * unit)
    below = of_blocks(
        lambda share, part: share.where(_is_below(share, level[part, None]), 0).sum(1), left_out.clone()
    )
    return replace(selection, entries=Balance(level, below))


def _tiles(columns: slice) -> slice:
    return slice(columns.start // TILE, -(-columns.stop // TILE))


def _octave(mass: Tensor) -> Tensor:
    """Quarter octaves from 2^-4 down to a mass, int64 up to BINS; 0: not below 2^-4, or NaN."""
    return (-4 * mass.log2() - 16).ceil().nan_to_num(nan=0.0).clamp(0, BINS).long()


def _is_below(mass: Tensor, level: Tensor) -> Tensor:
    """Whether a mass is below its row's level, the last of which is zero. NaN is not."""
    return ((_octave(mass) + 1) // 2).clamp(max=LEVELS - 1).gt(level) | (mass == 0)


def _curve(masses: Tensor) -> Tensor:
    """(b, LEVELS): what a row's masses, (b, K), below each level amount to at most, as they are counted."""
    octave = _octave(masses)
    edge = torch.exp2(-4 - (octave - 1) / 4).to(masses.dtype).where((octave > 0) & (masses > 0), 0)
    sums = masses.new_zeros(masses.shape[0], BINS // 2 + 1).scatter_add_(1, (octave + 1) // 2, edge)
    below = sums.flip(1).cumsum(1).flip(1)[:, 1 : LEVELS + 1]
    below[:, -1] = 0
    return below


def balance(curve: Tensor, weight: Tensor, budget: Tensor) -> Tensor:
    """Per row the level, of (n, LEVELS) masses below each, that keeps Σ (weight·left_out)² within budget²."""
    place = torch.arange(LEVELS, dtype=curve.dtype, device=curve.device)
    levels = torch.where(place < LEVELS - 1, torch.exp2(-4 - place / 2), 0)
    counted = torch.maximum(curve, levels)
    cost = (weight.square()[:, None] * levels * counted).nan_to_num(nan=torch.inf)
    cost[:, -1] = 0
    for candidate in range(CANDIDATES):
        kappa = budget.square() * 2 ** (-0.5 * candidate) if candidate < CANDIDATES - 1 else 0
        chosen = (cost <= kappa).int().argmax(1)  # the first
        if (weight * counted.gather(1, chosen[:, None])[:, 0]).square().nansum() <= budget.square():
            break
    return chosen
