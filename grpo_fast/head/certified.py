"""The certified backward in plain torch: what the kernels leave out, left out.

Where no kernel runs it saves no time. It shows what a tolerance does to a training run on any device, and is
the second oracle of the kernels' tests. The rules and their reasons are those of `kernels/select.py`,
`kernels/balance.py` and `kernels/sparse_rows.py`, said here once more as plainly as they can be; nothing is
rounded to half precision on the way. Rows are worked on a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.head.problem import HeadGradients, HeadProblem, RowGradients, RowStatistics
from grpo_fast.head.reference import LiveRows, add_into, logits
from grpo_fast.kernels import BF16_ROUNDING, CANDIDATES, EMIT_SHARE, LEVELS, PAIR_SHARE, TILE

_BLOCK_BYTES = 64 << 20


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    *,
    tolerance: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    weight_gradient: Tensor | None = None,
) -> tuple[HeadGradients, dict[str, Tensor]]:
    """Gradients through the log-probability and the log-sum-exp, and the certificate's numbers.

    Args:
        gradients: none through the entropy or the mean logit, which are not sparse.
        weight_gradient: as in `reference.backward`.
    """
    rows, index = LiveRows.of(problem, statistics, gradients)
    kind = rows.logsumexp.dtype
    budget = tolerance * BF16_ROUNDING * _gradient_norm(rows, statistics.logprob[index])
    levels = _levels(rows.logsumexp)

    curves = [_left_out_below(b.tile_mass.where(~b.target_tile, 0), levels) for b in _blocks(rows)]
    pairs = _balance(_joined(curves, levels), levels, rows.mass.abs(), PAIR_SHARE * budget)
    entries = pairs
    if need_hidden:
        curves = [_entry_curve(block, pairs, levels) for block in _blocks(rows)]
        entries = _balance(_joined(curves, levels), levels, rows.mass.abs(), budget)

    def zeros(wanted: bool, *shape: int) -> Tensor | None:
        return torch.zeros(*shape, dtype=kind, device=index.device) if wanted else None

    of_hidden = zeros(need_hidden, index.numel(), problem.hidden.shape[1])
    of_weight = zeros(need_weight, *problem.weight.shape)
    of_bias = zeros(need_bias, problem.vocabulary)
    weight, visited = problem.weight.to(kind), torch.zeros((), dtype=kind, device=index.device)
    for block in _blocks(rows):
        live = block.live(pairs)
        kept = block.gradient.where(_over_columns(live, problem.vocabulary), 0)
        visited += live.sum()
        if of_weight is not None:
            of_weight.addmm_(kept.t(), block.rows.problem.hidden.to(kind))
        if of_bias is not None:
            of_bias += kept.sum(0)
        if of_hidden is not None:
            least = torch.maximum(entries.threshold, EMIT_SHARE * pairs.threshold)[block.part, None]
            small = ~block.target & (block.share < least)
            of_hidden[block.part] = (block.gradient if entries.unmet else kept.where(~small, 0)) @ weight
    left_out = entries.left_out
    if entries.unmet:
        left_out = pairs.left_out if need_weight or need_bias else torch.zeros_like(left_out)
    found = HeadGradients(
        None if of_hidden is None else _scattered(problem.hidden, index, of_hidden),
        None if of_weight is None else add_into(weight_gradient, of_weight, problem.weight.dtype),
        None if of_bias is None else of_bias.to(problem.bias.dtype),
    )
    return found, _certificate(rows, problem, visited, left_out, budget / max(tolerance, 1e-30))


@dataclass(frozen=True)
class _Block:
    """A few rows, b, over the whole vocabulary: V entries in T tiles."""

    part: slice  # of the live rows
    rows: LiveRows
    gradient: Tensor  # (b, V) dL/d(x·w + bias)
    share: Tensor  # (b, V) the same, as a probability
    target: Tensor  # (b, V) bool
    tile_mass: Tensor  # (b, T) probability
    target_tile: Tensor  # (b, T) bool

    def live(self, pairs: _Balance) -> Tensor:
        """(b, T) bool: tiles that are visited. A NaN is, so that it reaches the gradient."""
        below = (self.tile_mass < pairs.threshold[self.part, None]) | (self.tile_mass == 0)
        return ~below | self.target_tile


@dataclass(frozen=True)
class _Balance:
    """Per live row what may be left out, (n,); `unmet`: even nothing is too much."""

    threshold: Tensor
    left_out: Tensor
    unmet: bool


def _blocks(rows: LiveRows) -> Iterator[_Block]:
    problem, kind = rows.problem, rows.logsumexp.dtype
    height = max(1, _BLOCK_BYTES // (problem.vocabulary * kind.itemsize))
    everything = slice(0, problem.vocabulary)
    for start in range(0, problem.hidden.shape[0], height):
        part = slice(start, start + height)
        block = rows.rows(part)
        p = (logits(block.problem, everything) - block.logsumexp[:, None]).exp_()
        gradient = block.product_gradient(everything)
        scale = block.mass.abs() * block.problem.logit_scale
        if block.problem.inv_temperature is not None:
            scale = scale * block.problem.inv_temperature.to(kind)
        targets = block.problem.targets[:, None]
        tiles = torch.arange(-(-problem.vocabulary // TILE), device=targets.device)
        yield _Block(
            part, block, gradient,
            share=torch.where(scale[:, None] == 0, 0, gradient.abs() / scale[:, None]),
            target=torch.arange(problem.vocabulary, device=targets.device) == targets,
            tile_mass=F.pad(p, (0, -problem.vocabulary % TILE)).unflatten(1, (-1, TILE)).sum(2),
            target_tile=(tiles == targets // TILE) & (targets < problem.vocabulary),
        )  # fmt: skip


def _gradient_norm(rows: LiveRows, logprob: Tensor) -> Tensor:
    """sqrt(Σ_i (Σ_v|G_iv|)²); a row of NaN is not counted."""
    total = rows.target.abs() + rows.mass.abs() * -logprob.expm1()
    return total.nan_to_num(nan=0.0).square().sum().sqrt()


def _levels(like: Tensor) -> Tensor:
    """(LEVELS,) thresholds, descending to zero."""
    halves = torch.arange(LEVELS, dtype=like.dtype, device=like.device)
    return torch.where(halves < LEVELS - 1, torch.exp(-(4 + 0.5 * halves) * log(2)), 0)


def _left_out_below(masses: Tensor, levels: Tensor) -> Tensor:
    """(LEVELS, b): the sum of a row's masses, (b, K), below each level."""
    ascending = levels.flip(0)
    bucket = torch.bucketize(masses, ascending, right=True)
    sums = masses.new_zeros(masses.shape[0], levels.numel() + 1).scatter_add_(1, bucket, masses)
    return sums[:, : levels.numel()].cumsum(1).flip(1).t()


def _entry_curve(block: _Block, pairs: _Balance, levels: Tensor) -> Tensor:
    """(LEVELS, b): what whole pairs leave out, what is not emitted, and the emitted entries below."""
    live = _over_columns(block.live(pairs), block.share.shape[1])
    share = block.share.where(live & ~block.target, 0)
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


def _certificate(
    rows: LiveRows, problem: HeadProblem, visited: Tensor, left_out: Tensor, unit: Tensor
) -> dict[str, Tensor]:
    count, tiles = problem.targets.numel(), -(-problem.vocabulary // TILE)
    error = (rows.mass * left_out).nan_to_num().square().sum().sqrt()
    return {
        "density": visited / max(count * tiles, 1),
        "left_out_mean": left_out.sum() / max(left_out.numel(), 1),
        "left_out_max": left_out.max() if left_out.numel() else left_out.sum(),
        "error_bound": torch.where(error > 0, error / unit, 0.0),
    }


def _joined(curves: list[Tensor], levels: Tensor) -> Tensor:
    return torch.cat(curves, 1) if curves else levels.new_zeros(levels.numel(), 0)


def _over_columns(of_tiles: Tensor, vocabulary: int) -> Tensor:
    """(b, T) -> (b, V)."""
    return of_tiles.repeat_interleave(TILE, 1)[:, :vocabulary]


def _scattered(like: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    found = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return found.index_copy_(0, index, rows.to(like.dtype))
