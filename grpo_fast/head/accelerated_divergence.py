"""Divergences of two heads on a CUDA device: the kernels, and the bookkeeping around them.

Both directions ask the host for the rows with work, as cuBLAS must know its sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.head.accelerated import with_unit_stride
from grpo_fast.head.call import HeadGradients, KLCall, RowDivergence, Wanted
from grpo_fast.head.divergence import distributions, divergence_terms
from grpo_fast.head.plan import Workload, dense_columns
from grpo_fast.kernels import TILE
from grpo_fast.kernels.divergence import (
    DivergenceRows,
    HeadPair,
    TileDivergence,
    divergence_gradients,
    tile_divergence,
)

_FOLDED_ROWS = 4096  # whose tiles are folded at a time: a few numbers each


def forward(call: KLCall) -> RowDivergence:
    """Every row's divergence, zero for masked rows."""
    rows, index = RowDivergence.allocate(call), call.mask.nonzero().squeeze(1)
    if not index.numel():
        return rows
    block = call.rows(index)
    pair = _pair(block)
    if block.logsumexp is None or block.ref_logsumexp is None:
        found = _folded(tile_divergence(pair), block)
    else:
        shift = block.logsumexp - block.ref_logsumexp
        found = RowDivergence(shift, block.logsumexp, block.ref_logsumexp, shift, shift)
    if call.direction == "jsd":
        parts = tile_divergence(pair, DivergenceRows(*found[1:4]))
        found = found._replace(divergence=parts.lse.sum(1), center=parts.ref_lse.sum(1))
    for every, of_work in zip(rows, found, strict=True):
        every[index] = of_work
    return rows


def backward(
    call: KLCall,
    rows: RowDivergence,
    of_divergence: Tensor,
    of_logsumexp: Tensor | None,
    wanted: Wanted,
) -> HeadGradients:
    """Exact gradients."""
    live = call.mask & ((of_divergence != 0) | (False if of_logsumexp is None else of_logsumexp != 0))
    index = live.nonzero().squeeze(1)
    # A part of a larger divergence is relative to nothing: what it lacks comes with the log-sum-exp.
    center = rows.center if call.logsumexp is None else torch.zeros_like(rows.center)
    of_rows = (*rows[1:4], center, of_divergence, of_logsumexp)
    chosen = DivergenceRows(*(None if t is None else t[index] for t in of_rows))  # type: ignore[arg-type]
    columns = dense_columns(Workload(index.numel(), call.weight.shape[0], call.hidden.dtype), TILE)
    result = HeadGradients(*divergence_gradients(_pair(call.rows(index)), chosen, wanted, columns=columns))
    if result.hidden is None:
        return result
    hidden = torch.zeros_like(call.hidden).index_copy_(0, index, result.hidden.to(call.hidden.dtype))
    return result._replace(hidden=hidden)


def _pair(call: KLCall) -> HeadPair:
    return HeadPair(*map(with_unit_stride, (call.student, call.reference)), call.direction, call.beta)


def _folded(tiles: TileDivergence, call: KLCall) -> RowDivergence:
    """The chain rule of the KL over the tiles."""
    found = []
    for lse, ref_lse, within in zip(*(part.split(_FOLDED_ROWS) for part in tiles), strict=True):
        whole = distributions(lse, ref_lse, call._replace(logsumexp=None))
        p, q, d = whole[:3]
        if call.direction == "forward":
            terms = divergence_terms(q, p, -d).addcmul_(q, within)
        else:
            terms = divergence_terms(p, q, d).addcmul_(p, within)
        divergence = terms.sum(1)
        found.append(RowDivergence(divergence, *whole[3:], divergence))
    return RowDivergence(*map(torch.cat, zip(*found, strict=True)))
