"""Divergences of two heads on a CUDA device: the kernels, and the bookkeeping around them.

Both directions ask the host for the rows with work, as cuBLAS must know its sizes. While a CUDA graph is
captured nobody can be asked: all rows are worked on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.head import accelerated
from grpo_fast.head.call import HeadGradients, KLCall, RowDivergence, Wanted
from grpo_fast.head.divergence import distributions, divergence_terms
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Workload, dense_columns
from grpo_fast.kernels import TILE
from grpo_fast.kernels.divergence import (
    DivergenceRows,
    TileDivergence,
    divergence_gradients,
    tile_divergence,
)

_FOLDED_ROWS = 4096  # whose tiles are folded at a time: a few numbers each


def forward(call: KLCall) -> RowDivergence:
    """Every row's divergence, zero for masked rows."""
    block, index = _at_work(call, call.mask)
    rows = RowDivergence.allocate(call)
    if not block.mask.numel():
        return rows
    if call.logsumexp is None:
        found = _folded(tile_divergence(block), block)
    else:
        assert block.logsumexp is not None and block.ref_logsumexp is not None
        shift = block.logsumexp - block.ref_logsumexp
        found = RowDivergence(shift, block.logsumexp, block.ref_logsumexp, shift, shift)
    if call.direction == "jsd":
        parts = tile_divergence(block, DivergenceRows(*found[1:4]))
        found = found._replace(divergence=parts.lse.sum(1), center=parts.ref_lse.sum(1))
    if index is None:
        return RowDivergence(*(torch.where(call.mask, each, 0) for each in found))
    return RowDivergence(
        *(total.index_copy_(0, index, each) for total, each in zip(rows, found, strict=True))
    )


def backward(
    call: KLCall,
    rows: RowDivergence,
    of_divergence: Tensor | None,
    of_logsumexp: Tensor | None,
    wanted: Wanted,
    certificate: Certificate,
) -> HeadGradients:
    """Exact gradients; fills the certificate."""
    certificate.fill_exact()
    given = [None if g is None else torch.where(call.mask, g, 0) for g in (of_divergence, of_logsumexp)]
    some = [g != 0 for g in given if g is not None]
    block, index = _at_work(call, torch.stack(some).any(0) if some else call.mask & False)
    # A part of a larger divergence is relative to nothing: what it lacks comes with the log-sum-exp.
    center = rows.center if call.logsumexp is None else torch.zeros_like(rows.center)
    of_rows = (*rows[1:4], center, *given)
    chosen = DivergenceRows(*(t if t is None or index is None else t[index] for t in of_rows))
    work = Workload(block.hidden.shape[0], block.weight.shape[0], call.hidden.dtype)
    made = divergence_gradients(block, chosen, wanted, columns=dense_columns(work, TILE))
    result = HeadGradients(*made)
    if result.hidden is None:
        return result
    hidden = result.hidden.to(call.hidden.dtype)
    if index is not None:
        hidden = torch.zeros_like(call.hidden).index_copy_(0, index, hidden)
    return result._replace(hidden=hidden)


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
        found.append(RowDivergence(divergence, *whole[4:], divergence))
    return RowDivergence(*map(torch.cat, zip(*found, strict=True)))


def _at_work(call: KLCall, mask: Tensor) -> tuple[KLCall, Tensor | None]:
    """The rows of the mask with operands as kernels read them, and which they are; None for all rows."""
    index = None if accelerated.capturing(call.hidden) else mask.nonzero().squeeze(1)
    if index is None:  # what a masked row holds is anything, and zero times NaN is not zero
        masked = ~mask[:, None]
        hidden, ref_hidden = call.hidden.masked_fill(masked, 0), call.ref_hidden.masked_fill(masked, 0)
        call = call._replace(hidden=hidden, ref_hidden=ref_hidden)
    else:
        call = call.rows(index)
    operands = call.hidden, call.weight, call.ref_hidden, call.ref_weight
    hidden, weight, ref_hidden, ref_weight = (t if t.stride(1) == 1 else t.contiguous() for t in operands)
    if call.weight is call.ref_weight or call.weight.data_ptr() == call.ref_weight.data_ptr():
        ref_weight = weight if call.weight.stride() == call.ref_weight.stride() else ref_weight
    bias, ref_bias = (None if t is None else t.contiguous() for t in (call.bias, call.ref_bias))
    call = call._replace(hidden=hidden, weight=weight, ref_hidden=ref_hidden, ref_weight=ref_weight)
    return call._replace(bias=bias, ref_bias=ref_bias), index
