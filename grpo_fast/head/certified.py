"""What the kernels would leave out of a backward, left out in plain torch.

Where no kernel runs it saves no time. It shows what a tolerance does to a training run on any device, and is
the second oracle of the kernels' tests. The rules and their reasons are those of `kernels/select.py`,
`kernels/balance.py` and `kernels/sparse_rows.py`; nothing is rounded to half precision on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.head.plan import Chunks
from grpo_fast.head.problem import HeadProblem, LogitGradient, Wanted
from grpo_fast.kernels import BF16_ROUNDING, CANDIDATES, EMIT_SHARE, LEVELS, PAIR_SHARE, TILE


@dataclass(frozen=True)
class Balance:
    """Per row what may be left out, (n,); `unmet`: even nothing is too much."""

    threshold: Tensor
    left_out: Tensor
    unmet: bool = False


@dataclass(frozen=True)
class Selection:
    """What the gradients of n rows over T tiles leave out: whole tiles, and dX single entries besides."""

    rows: LogitGradient
    targets: Tensor  # (n,)
    scale: Tensor  # (n,) |dL/d(x·w)| per probability
    visited: Tensor  # (n, T) bool
    pairs: Balance  # of the tiles
    entries: Balance  # of the entries in visited tiles, and what the others leave out
    unit: Tensor  # () the certified error of rounding the logit gradient to bfloat16

    def kept(self, gradient: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Of the logit gradient (b, w) of some rows and columns, what goes into dW, and what into dX."""
        of_pairs = gradient.where(self._over(part, columns), 0)
        if self.entries.unmet:
            return of_pairs, gradient
        least = torch.maximum(self.entries.threshold, EMIT_SHARE * self.pairs.threshold)[part, None]
        is_target, share = self._shares(gradient, part, columns)
        return of_pairs, of_pairs.where(is_target | ~(share < least), 0)

    def metrics(self, wanted: Wanted, density_of: int) -> dict[str, Tensor]:
        """The certificate's numbers; `density_of`: all pairs, those of other rows among them."""
        left_out = self.entries.left_out
        if self.entries.unmet:
            left_out = self.pairs.left_out if wanted.weight or wanted.bias else torch.zeros_like(left_out)
        error = (self.rows.mass * left_out).nan_to_num().square().sum().sqrt()
        return {
            "density": self.visited.sum() / max(density_of, 1),
            "left_out_mean": left_out.sum() / max(left_out.numel(), 1),
            "left_out_max": left_out.max() if left_out.numel() else left_out.sum(),
            "error_bound": torch.where(error > 0, error / self.unit, 0.0),
        }

    def entry_sums(self, gradient: Tensor, part: slice, columns: slice, levels: Tensor) -> Tensor:
        """(LEVELS, b): what is not emitted, and the emitted entries below each level; of visited tiles."""
        is_target, share = self._shares(gradient, part, columns)
        share = share.where(self._over(part, columns) & ~is_target, 0)
        quiet = share < EMIT_SHARE * self.pairs.threshold[part, None]
        return share.where(quiet, 0).sum(1) + _sums_below(share.where(~quiet, 0), levels)

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
    levels = thresholds(rows.mass)
    tile = torch.arange(-(-problem.vocabulary // TILE), device=targets.device)
    mass = rows.mass.new_empty(count, tile.numel())
    for part, columns in blocks:
        p = (problem.rows(part).logits(columns) - rows.logsumexp[part, None]).exp_()
        mass[part, _tiles(columns)] = F.pad(p, (0, -p.shape[1] % TILE)).unflatten(1, (-1, TILE)).sum(2)
    has_target = (tile == targets[:, None] // TILE) & (targets < problem.vocabulary)[:, None]
    curve = _sums_below(mass.where(~has_target, 0), levels)
    pairs = balance(curve, levels, rows.mass.abs(), PAIR_SHARE * tolerance * unit)
    # A tile of NaN is visited, so that it reaches the gradient.
    visited = has_target | ~((mass < pairs.threshold[:, None]) | (mass == 0))
    scale = rows.mass.abs() * problem.logit_scale
    if problem.inv_temperature is not None:
        scale = scale * problem.inv_temperature.to(scale.dtype)
    selection = Selection(rows, targets, scale, visited, pairs, pairs, unit)
    if not wanted.hidden:
        return selection
    curve = pairs.left_out.expand(LEVELS, count).clone()
    for part, columns in blocks:
        gradient = rows.rows(part).of_products(problem.rows(part), columns)
        curve[:, part] += selection.entry_sums(gradient, part, columns, levels)
    return replace(selection, entries=balance(curve, levels, rows.mass.abs(), tolerance * unit))


def _tiles(columns: slice) -> slice:
    return slice(columns.start // TILE, -(-columns.stop // TILE))


def thresholds(like: Tensor) -> Tensor:
    """(LEVELS,) thresholds, descending to zero."""
    halves = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.where(halves < LEVELS - 1, torch.exp(-(4 + 0.5 * halves) * log(2)), 0)


def _sums_below(masses: Tensor, levels: Tensor) -> Tensor:
    """(LEVELS, b): the sum of a row's masses, (b, K), below each level."""
    bucket = torch.bucketize(masses, levels.flip(0), right=True)
    sums = masses.new_zeros(masses.shape[0], LEVELS + 1).scatter_add_(1, bucket, masses)
    return sums[:, :LEVELS].cumsum(1).flip(1).t()


def balance(curve: Tensor, levels: Tensor, weight: Tensor, budget: Tensor) -> Balance:
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
    return Balance(levels[chosen], left_out, unmet=bool(spent > budget.square()))
