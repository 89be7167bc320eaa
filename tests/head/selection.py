"""An oracle in plain torch of what the kernels keep of a sparse backward.

The rule and its reasons are those of `kernels/select.py`; nothing is rounded to half precision on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from grpo_fast.kernels import BF16_ROUNDING, BINS, ENTRY_SHARE, GOLDEN, LEAST_DENSITY, STRATUM, TILE
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
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.reference import backward as exact_backward

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Selection:
    """By which factor the gradients of n rows take every one of T tiles, and dX single entries of those."""

    targets: Tensor  # (n,)
    scale: Tensor  # (n, T) of a pair's logit gradient; zero where it is left out
    entry: Tensor  # (n, 1) what a smaller entry of dX is kept as, or left out
    threshold: Tensor  # () τ
    seed: Tensor  # (n,) int64
    small: Tensor  # () Σ w/τ over the pairs below τ
    unit: Tensor  # () τ relative to what rounding the batch to bfloat16 costs

    def of_pairs(self, gradient: Tensor, part: slice, columns: slice) -> Tensor:
        """Of the logit gradient (b, w) of some rows and columns, what goes into dW."""
        tiles = slice(columns.start // TILE, -(-columns.stop // TILE))
        scale = self.scale[part, tiles].repeat_interleave(TILE, 1)[:, : columns.stop - columns.start]
        return (gradient * scale).where(scale != 0, 0)

    def small_entries(self, of_pairs: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Row and column, (m,), of the entries that dX may leave out."""
        row, column = ((of_pairs != 0) & (of_pairs.abs() < self.entry[part])).nonzero(as_tuple=True)
        other = column + columns.start != self.targets[part][row]
        return row[other], column[other]

    def of_hidden(self, of_pairs: Tensor, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """What goes into dX, and Σ a times their threshold, in units of τ², of what may be left out."""
        row, column = self.small_entries(of_pairs, part, columns)
        value, entry = of_pairs[row, column], self.entry[part, 0][row]
        drawn = _mix(_mix(self.seed[part][row] ^ _WORD) + (column + columns.start) * GOLDEN) >> 8
        chosen = drawn.to(value.dtype) * entry < value.abs() * 2**24
        kept = of_pairs.index_put((row, column), (value.sign() * entry).where(chosen, 0))
        return kept, (value.abs() / self.threshold * (entry / self.threshold)).sum()

    def metrics(self, small_entries: Tensor, density_of: int) -> Tensor:
        """The certificate's numbers, (4,).

        Args:
            small_entries: () the sum of what `of_hidden` returned.
            density_of: all pairs, those of other rows among them.
        """
        drawn = self.scale.where(self.scale != 1, 0)
        numbers = (
            (self.scale != 0).sum() / max(density_of, 1),
            self.unit * (self.small + small_entries).sqrt(),
            self.unit * self.small.sqrt(),
            drawn.amax().clamp(min=1) if drawn.numel() else torch.ones_like(self.unit),
        )
        return torch.stack([number.float() for number in numbers])


def select(call: HeadCall, rows: LogitGradient, numbers: Tensor, salt: Tensor, tolerance: float) -> Selection:
    """For gradients through log-probability, log-sum-exp and entropy; that of the mean logit is not sparse.

    Args:
        call: the rows with a gradient, (n,), and `numbers` their places in the batch.
        salt: () int64 of the batch, `salt_of`.
    """
    z = F.pad(call.logits(slice(0, call.vocabulary)), (0, -call.vocabulary % TILE), value=-torch.inf)
    selection = choose(call, rows, numbers, salt, tolerance, z.unflatten(1, (-1, TILE)).logsumexp(2))
    every, columns = slice(0, call.targets.numel()), slice(0, call.vocabulary)
    of_pairs = selection.of_pairs(rows.of_products(call, columns), every, columns)
    row, column = selection.small_entries(of_pairs, every, columns)
    sums = torch.zeros_like(selection.entry[:, 0]).index_add_(0, row, of_pairs[row, column].abs())
    return within_tolerance(selection, call, rows, sums[:, None], tolerance)


def sampled_backward(
    call: HeadCall, statistics: RowStatistics, gradients: RowGradients, wanted: Wanted, *rest: Any
) -> HeadGradients:
    """`reference.backward` that samples as the kernels do, where the call has a tolerance."""
    if not call.tolerance or gradients.mean_logit is not None:
        return exact_backward(call, statistics, gradients, wanted, *rest)
    certificate: Certificate = rest[0]
    rows = LogitGradient.of(call, statistics, gradients)
    index = rows.live().nonzero().squeeze(1)
    live, rows = call.rows(index), rows.rows(index)
    selection = select(live, rows, index, salt_of(statistics.logsumexp, call.targets), call.tolerance)
    every, columns, kind = slice(0, index.numel()), slice(0, call.vocabulary), call.accumulator
    of_pairs = selection.of_pairs(rows.of_products(live, columns), every, columns)
    of_hidden, small = selection.of_hidden(of_pairs, every, columns)
    certificate.fill(selection.metrics(small, call.targets.numel() * -(-call.vocabulary // TILE)))
    hidden = torch.zeros_like(call.hidden).index_copy_(
        0, index, (of_hidden @ call.weight.to(kind)).to(call.hidden.dtype)
    )
    weight = (of_pairs.T @ live.hidden.to(kind)).to(call.weight.dtype) if wanted.weight else None
    if weight is not None and wanted.into_weight is not None:
        wanted.into_weight.add_(weight)
    bias = of_pairs.sum(0).to(call.bias.dtype) if wanted.bias and call.bias is not None else None
    return HeadGradients(hidden if wanted.hidden else None, weight, bias)


@contextmanager
def sampling_without_kernels() -> Iterator[None]:
    """Within it the head samples on any device."""
    with mock.patch.object(reference, "backward", sampled_backward):
        yield


def within_tolerance(
    selection: Selection, call: HeadCall, rows: LogitGradient, sums: Tensor, tolerance: float
) -> Selection:
    """A row whose small entries, (n, 1) Σ a of them, would cost more than its part of the tolerance has a
    lower threshold of them.
    """
    unit = selection.unit * BF16_ROUNDING * ENTRY_SHARE
    active = (norms_of(call, rows) > 0).sum()
    most = (tolerance * BF16_ROUNDING / unit) ** 2 / active
    return replace(selection, entry=selection.entry / (sums / selection.entry / most).clamp(min=1))


def choose(
    call: HeadCall,
    rows: LogitGradient,
    numbers: Tensor,
    salt: Tensor,
    tolerance: float,
    tile_lse: Tensor,
) -> Selection:
    """`select`, given the log-sum-exp of each tile, (n, T)."""
    targets, tile = call.targets, torch.arange(tile_lse.shape[1], device=tile_lse.device)
    has_target = (tile == targets[:, None] // TILE) & (targets < call.vocabulary)[:, None]
    weight = pair_weights(call, rows, tile_lse)
    norm = norm_of(call, rows)
    threshold = norm * _relative_threshold(weight.where(~has_target, torch.inf) / norm, tolerance)
    seed = _mix(_bits(rows.logsumexp) + numbers * GOLDEN + salt)
    scale, small = draw(weight / threshold, has_target, seed)
    finite = (rows.mass + rows.target + rows.logsumexp).isfinite().all()
    unit = torch.where(finite, threshold / (BF16_ROUNDING * norm), torch.nan)
    entry = (ENTRY_SHARE * threshold).expand(targets.numel(), 1)
    return Selection(targets, scale, entry, threshold, seed, small, unit)


def salt_of(logsumexp: Tensor, targets: Tensor) -> Tensor:
    """() int64 of a batch, whose every row with work takes part: other micro-batches and ranks draw anew."""
    row = torch.arange(targets.numel(), device=targets.device)
    of_rows = _mix(_bits(logsumexp) ^ _mix(row * GOLDEN + targets))
    return of_rows.where(targets >= 0, 0).sum() & _WORD


def pair_weights(call: HeadCall, rows: LogitGradient, tile_lse: Tensor) -> Tensor:
    """(n, T): at least Σ |dL/d(x·w)| over each tile."""
    log_mass = tile_lse - rows.logsumexp[:, None]
    size = rows.mass.abs()[:, None]
    if rows.entropy is not None and rows.entropy_gradient is not None:
        surprise = (log_mass + rows.entropy[:, None]).abs().nan_to_num(posinf=0) + math.log(TILE)
        size = size + rows.entropy_gradient.abs()[:, None] * surprise
    return log_mass.exp() * size * _steepest(call, size.dtype)


def draw(ratio: Tensor, certain: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Of pairs' w/τ, (n, T): the factor of each, zero where it is left out; and Σ w/τ of the uncertain ones.

    Every unit of the cumulated w/τ of a row, a stratum, has one point, drawn evenly; a pair counts as often
    as its part of the line holds points.
    """
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
    return torch.where(certain, 1.0, drawn).to(ratio.dtype), ratio.where(~certain, 0).sum()


def _relative_threshold(weight: Tensor, tolerance: float) -> Tensor:
    """The largest τ, of pairs' w, both relative to the batch's norm, with τ·Σ_{w<τ} w within the tolerance's
    budget and LEAST_DENSITY of the pairs kept, as far as quarter octaves tell.
    """
    octave = ((-4 * weight.log2()).floor() + 1).nan_to_num(nan=0.0, neginf=0.0)
    place = octave.clamp(0, BINS - 1).long().where(weight > 0, 0)
    counts = torch.bincount(place.flatten(), minlength=BINS).to(weight.dtype)
    counts[0] = 0  # what is certain, and nothing
    edge = torch.exp2((1 - torch.arange(BINS, device=weight.device, dtype=weight.dtype)) / 4)
    below = (counts * edge).flip(0).cumsum(0).flip(0)
    within = torch.minimum(edge, (tolerance * BF16_ROUNDING) ** 2 / below)[1:].amax()
    kept = counts.cumsum(0) - counts + below / edge
    return within.minimum(edge[1:].where(kept[1:] >= LEAST_DENSITY * counts.sum(), 0).amax())


def norm_of(call: HeadCall, rows: LogitGradient) -> Tensor:
    """() of all rows."""
    return norms_of(call, rows).double().square().sum().sqrt().to(rows.mass.dtype)


def norms_of(call: HeadCall, rows: LogitGradient) -> Tensor:
    """(n,) half of Σ|dL/d(x·w)|, at least: the target's entry is as large as all the others together."""
    here = call.targets < call.vocabulary
    size = torch.where(here, rows.target.abs(), rows.mass.abs() / 2) * _steepest(call, rows.mass.dtype)[:, 0]
    if call.softcap is not None:
        inverse = 1.0 if call.inv_temperature is None else call.inv_temperature
        capped = (rows.logprob + rows.logsumexp) / (inverse * call.softcap)
        size = size * torch.where(here, 1 - capped.square(), 1).clamp(min=0)
    return size.where(size.isfinite(), 0)


def _steepest(call: HeadCall, kind: torch.dtype) -> Tensor:
    """(n, 1) or (1, 1): the largest dz/d(x·w)."""
    if call.inv_temperature is None:
        return torch.full((1, 1), abs(call.logit_scale), dtype=kind, device=call.targets.device)
    return (call.inv_temperature.to(kind) * abs(call.logit_scale))[:, None]


def _bits(values: Tensor) -> Tensor:
    return values.float().view(torch.int32).long()


def _mix(word: Tensor) -> Tensor:
    """A hash of 32 bits, int64: two rounds of multiply and shift."""
    word = word & _WORD
    word = ((word ^ word >> 16) * 0x7FEB352D) & _WORD
    word = ((word ^ word >> 15) * 0x846CA68B) & _WORD
    return word ^ word >> 16
