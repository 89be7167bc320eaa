"""An oracle in plain torch of the sparse backward's selection; `kernels/select.py` has the rule."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from grpo_fast.kernels import (
    BF16_ROUNDING,
    BINS,
    ENTRY_SHARE,
    GOLDEN,
    LEAST_DENSITY,
    PAIR_BUDGET,
    STRATUM,
    TILE,
)
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.call import (
    HeadCall,
    HeadGradients,
    LogitGradient,
    RowGradients,
    RowStatistics,
    Wanted,
)
from grpo_fast.head.reference import backward as exact_backward

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Selection:
    """The factors of n rows' gradients in each of T tiles, and the threshold of dX's entries."""

    scale: Tensor  # (n, T) of a pair's logit gradient; zero if it is left out
    entry: Tensor  # (n, 1) threshold of dX's entries
    threshold: Tensor  # () τ
    seed: Tensor  # (n,) int64
    room: Tensor  # () upper bound of the kept pairs
    small: Tensor  # () Σ w/τ over the pairs below τ
    unit: Tensor  # () τ relative to the error of rounding to bfloat16
    left: Tensor  # () the squared tolerance that pairs leave, relative to the batch's norm


def sampled_backward(
    call: HeadCall, statistics: RowStatistics, gradients: RowGradients, wanted: Wanted, *rest: Any
) -> HeadGradients:
    """Replace `reference.backward` by one that samples as the kernels do."""
    if not call.tolerance or gradients.mean_logit is not None:
        return exact_backward(call, statistics, gradients, wanted, *rest)
    rows = LogitGradient.of(call, statistics, gradients)
    index = rows.live().nonzero().squeeze(1)
    live, rows, every = call.rows(index), rows.rows(index), slice(0, call.vocabulary)
    z = F.pad(live.logits(every), (0, -call.vocabulary % TILE), value=-torch.inf)
    tile_lse = z.unflatten(1, (-1, TILE)).logsumexp(2)
    salt = salt_of(call, LogitGradient.of(call, statistics, gradients))
    chosen = choose(live, rows, index, salt, call.tolerance, tile_lse)
    scale = chosen.scale.repeat_interleave(TILE, 1)[:, : call.vocabulary]
    of_pairs = (rows.of_products(live, every) * scale).where(scale != 0, 0)
    of_hidden, small = of_entries(chosen, live, rows, of_pairs)
    rest[0].values.copy_(certificate(chosen, small, call.targets.numel() * tile_lse.shape[1]))
    kind = call.accumulator
    hidden = (of_hidden @ call.weight.to(kind)).to(call.hidden.dtype)
    hidden = torch.zeros_like(call.hidden).index_copy_(0, index, hidden)
    weight = (of_pairs.T @ live.hidden.to(kind)).to(call.weight.dtype) if wanted.weight else None
    if weight is not None and wanted.into_weight is not None:
        wanted.into_weight.add_(weight)
    bias = of_pairs.sum(0).to(call.bias.dtype) if wanted.bias and call.bias is not None else None
    return HeadGradients(hidden if wanted.hidden else None, weight, bias)


def of_entries(
    chosen: Selection, call: HeadCall, rows: LogitGradient, of_pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample dX's entries of (n, V) kept pairs; return them and Σ a·threshold/τ² of those below it."""
    other = torch.arange(call.vocabulary, device=of_pairs.device) != call.targets[:, None]
    size = of_pairs.abs()
    sums = size.where(other & (size < chosen.entry), 0).sum(1, keepdim=True)
    share = (chosen.scale != 0).sum(1, keepdim=True) / chosen.room
    most = chosen.left / (chosen.unit * BF16_ROUNDING * ENTRY_SHARE) ** 2 * share
    entry = chosen.entry / (sums / chosen.entry / most).clamp(min=1)
    row, column = (other & (size < entry) & (size > 0)).nonzero(as_tuple=True)
    value, entry = of_pairs[row, column], entry[row, 0]
    drawn = _mix(_mix(chosen.seed[row] ^ _WORD) + column * GOLDEN) >> 8
    counted = drawn.to(value.dtype) * entry < value.abs() * 2**24
    kept = of_pairs.index_put((row, column), (value.sign() * entry).where(counted, 0))
    return kept, (value.abs() / chosen.threshold * (entry / chosen.threshold)).sum()


def certificate(chosen: Selection, small_entries: Tensor, pairs: int) -> Tensor:
    """Compute the certificate's values, (4,)."""
    drawn = chosen.scale.where(chosen.scale != 1, 0)
    numbers = (
        (chosen.scale != 0).sum() / max(pairs, 1),
        chosen.unit * (chosen.small + small_entries).sqrt(),
        chosen.unit * chosen.small.sqrt(),
        drawn.amax().clamp(min=1) if drawn.numel() else torch.ones_like(chosen.unit),
    )
    return torch.stack([number.float() for number in numbers])


@contextmanager
def sampling_without_kernels() -> Iterator[None]:
    """Let the head sample on any device."""
    with mock.patch.object(reference, "backward", sampled_backward):
        yield


def choose(
    call: HeadCall,
    rows: LogitGradient,
    numbers: Tensor,
    salt: Tensor,
    tolerance: float,
    tile_lse: Tensor,
) -> Selection:
    """Select pairs of the n rows with a gradient.

    Args:
        numbers: (n,) positions of the rows in the batch.
        salt: () int64, `salt_of` the batch.
        tile_lse: (n, T) log-sum-exp of each tile.
    """
    targets, tile = call.targets, torch.arange(tile_lse.shape[1], device=tile_lse.device)
    has_target = (tile == targets[:, None] // TILE) & (targets < call.vocabulary)[:, None]
    weight = pair_weights(call, rows, tile_lse)
    norm = norm_of(call, rows)
    relative, left = _relative_threshold(weight.where(~has_target, torch.inf) / norm, tolerance)
    threshold = norm * relative
    seed = _mix(_bits(rows.logsumexp) + numbers * GOLDEN + salt)
    scale, room, small = draw(weight / threshold, has_target, seed)
    finite = (rows.mass + rows.target + rows.logsumexp).isfinite().all()
    unit = torch.where(finite, threshold / (BF16_ROUNDING * norm), torch.nan)
    entry = (ENTRY_SHARE * threshold).expand(targets.numel(), 1)
    return Selection(scale, entry, threshold, seed, room, small, unit, left)


def salt_of(call: HeadCall, rows: LogitGradient) -> Tensor:
    """Hash the seed and the rows of a batch, () int64."""
    targets = call.targets
    row = torch.arange(targets.numel(), device=targets.device)
    gradient = _bits(0 - rows.mass)  # the kernels have the other sign
    if rows.entropy_gradient is not None:
        gradient = gradient + _mix(_bits(rows.entropy_gradient))
    of_rows = _mix(_bits(rows.logsumexp) ^ _mix(row * GOLDEN + targets + _mix(gradient)))
    word = 0 if call.seed is None else random.Random(call.seed).getrandbits(31)
    return (of_rows.where(targets >= 0, 0).sum() + word) & _WORD


def pair_weights(call: HeadCall, rows: LogitGradient, tile_lse: Tensor) -> Tensor:
    """Bound Σ |dL/d(x·w)| over each tile, (n, T)."""
    log_mass = tile_lse - rows.logsumexp[:, None]
    size = rows.mass.abs()[:, None]
    if rows.entropy is not None and rows.entropy_gradient is not None:
        surprise = (log_mass + rows.entropy[:, None]).abs().nan_to_num(posinf=0) + math.log(TILE)
        size = size + rows.entropy_gradient.abs()[:, None] * surprise
    return log_mass.exp() * size * _steepest(call, size.dtype)


def draw(ratio: Tensor, certain: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample pairs by their (n, T) w/τ; return factors, a bound of the kept pairs, and the sampled Σ w/τ."""
    certain = certain | ~(ratio < 1)  # NaN is certain
    length = (ratio * STRATUM).where(~certain, 0).ceil().long()
    end = length.cumsum(1)
    start = end - length
    first, last = start // STRATUM, (end - 1).clamp(min=0) // STRATUM

    def hit(stratum: Tensor) -> Tensor:
        point = stratum * STRATUM + (_mix(seed[:, None] + stratum * GOLDEN) >> 32 - STRATUM.bit_length() + 1)
        return (start <= point) & (point < end)

    points = hit(first).to(ratio.dtype) + (hit(last) & (last != first)).to(ratio.dtype)
    drawn = points * STRATUM / length.clamp(min=1)
    room = certain.sum() + (-(-end[:, -1] // STRATUM)).sum()
    return torch.where(certain, 1.0, drawn).to(ratio.dtype), room, ratio.where(~certain, 0).sum()


def _relative_threshold(weight: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Choose τ from pairs' w, both relative to the batch's norm; return it and the budget that is left."""
    budget = (tolerance * BF16_ROUNDING) ** 2
    octave = ((-4 * weight.log2()).floor() + 1).nan_to_num(nan=0.0, neginf=0.0)
    place = octave.clamp(0, BINS - 1).long().where(weight > 0, 0)
    counts = torch.bincount(place.flatten(), minlength=BINS).to(weight.dtype)
    counts[0] = 0  # what is certain, and nothing
    edge = torch.exp2((1 - torch.arange(BINS, device=weight.device, dtype=weight.dtype)) / 4)
    below = (counts * edge).flip(0).cumsum(0).flip(0)
    within = torch.minimum(edge, PAIR_BUDGET * budget / below)[1:].amax()
    kept = counts.cumsum(0) - counts + below / edge
    threshold = within.minimum(edge[1:].where(kept[1:] >= LEAST_DENSITY * counts.sum(), 0).amax())
    spent = threshold * (counts * edge.minimum(threshold)).where(edge * 2**-0.25 < threshold, 0).sum()
    return threshold, budget - spent.clamp(max=PAIR_BUDGET * budget)


def norm_of(call: HeadCall, rows: LogitGradient) -> Tensor:
    """Combine the norms of all rows, ()."""
    return norms_of(call, rows).double().square().sum().sqrt().to(rows.mass.dtype)


def norms_of(call: HeadCall, rows: LogitGradient) -> Tensor:
    """Bound half of Σ|dL/d(x·w)| from below, (n,)."""
    here, logprob = call.targets < call.vocabulary, rows.logprob
    others = -logprob.expm1() * rows.mass
    if rows.entropy is not None and rows.entropy_gradient is not None:
        surprise = logprob.exp() * (logprob.clamp(min=-500) + rows.entropy)
        others = others + rows.entropy_gradient * surprise
    sizes = [rows.target.abs().where(here, 0), others.where(here, rows.mass).abs()]
    if call.softcap is not None:
        inverse = 1.0 if call.inv_temperature is None else call.inv_temperature
        at = (logprob + rows.logsumexp, rows.logsumexp)  # where the target is, and most of the others
        slopes = [(1 - (z / (inverse * call.softcap)).square()).clamp(min=0) for z in at]
        sizes = [size * slope for size, slope in zip(sizes, slopes, strict=True)]
    size = sum(sizes) / 2 * _steepest(call, rows.mass.dtype)[:, 0]
    return size.where(size.isfinite(), 0)


def _steepest(call: HeadCall, kind: torch.dtype) -> Tensor:
    """Compute the largest dz/d(x·w), (n, 1) or (1, 1)."""
    if call.inv_temperature is None:
        return torch.full((1, 1), abs(call.logit_scale), dtype=kind, device=call.targets.device)
    return (call.inv_temperature.to(kind) * abs(call.logit_scale))[:, None]


def _bits(values: Tensor) -> Tensor:
    return values.float().view(torch.int32).long()


def _mix(word: Tensor) -> Tensor:
    """Hash 32 bits by two rounds of multiply and shift, int64."""
    word = word & _WORD
    word = ((word ^ word >> 16) * 0x7FEB352D) & _WORD
    word = ((word ^ word >> 15) * 0x846CA68B) & _WORD
    return word ^ word >> 16
