"""Run the kernels of divergences of two heads on a CUDA device.

The forward and the exact backward read the rows that count on the host, because cuBLAS needs its sizes. The
sparse backward is that of `accelerated`. It selects by an upper bound of the l1 norm of each tile's logit
gradient, which the forward computes up to the row's upstream gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.head.accelerated import sampled_backward, with_unit_stride
from grpo_fast.head.call import (
    DivergenceGradients,
    HeadGradients,
    KLCall,
    RowDivergence,
    RowGradients,
    RowStatistics,
    Saved,
    Wanted,
)
from grpo_fast.head.divergence import distributions, divergence_terms, weighable_
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import HeadPlan, Workload, dense_columns
from grpo_fast.kernels import TILE
from grpo_fast.kernels.coefficients import row_coefficients
from grpo_fast.kernels.dense import row_aligned
from grpo_fast.kernels.divergence import TileDivergence, divergence_gradients, tile_divergence
from grpo_fast.kernels.two_heads import Divergence, DivergenceRows

_FOLDED_ROWS = 4096  # rows whose tiles are folded at one time


def allocate_saved(call: KLCall, plan: HeadPlan) -> Saved:
    """Allocate the tensors that `forward` saves."""
    head = call.student
    saved = Saved.empty(head)
    if plan.backward == "dense":
        return saved
    share = row_aligned(head.hidden.shape[0], -(-head.vocabulary // TILE), head.hidden, torch.float32)
    return saved._replace(tile_lse=share, row_scale=torch.zeros_like(share[:, 0]))


def forward(call: KLCall, plan: HeadPlan) -> tuple[RowDivergence, Saved]:
    """Compute every row's divergence, zero for masked rows."""
    rows, saved = RowDivergence.allocate(call), allocate_saved(call, plan)
    index, sparse = call.mask.nonzero().squeeze(1), plan.backward == "sparse"
    if not index.numel():
        return rows, saved
    block = call.rows(index)
    pair, is_jsd = _with_unit_strides(block), block.direction == "jsd"
    if block.logsumexp is None or block.ref_logsumexp is None:
        tiles = tile_divergence(pair, deviation=sparse and not is_jsd)
        found = _folded(tiles, block)
    else:
        shift = block.logsumexp - block.ref_logsumexp
        found = RowDivergence(shift, block.logsumexp, block.ref_logsumexp, shift, shift)
    if is_jsd:
        parts = tile_divergence(pair, DivergenceRows(*found[1:4]), deviation=sparse)
        found = found._replace(divergence=parts.lse.sum(1), center=parts.ref_lse.sum(1))
        if sparse:
            tiles = parts._replace(lse=tiles.lse)
    for every, of_work in zip(rows, found, strict=True):
        every[index] = of_work
    if sparse:
        for some in torch.arange(index.numel(), device=index.device).split(_FOLDED_ROWS):
            of_some = TileDivergence(*(part[some] for part in tiles if part is not None))
            share, size = _sizes(of_some, RowDivergence(*(each[some] for each in found)), block)
            saved.tile_lse[index[some]], saved.row_scale[index[some]] = share, size
    return rows, saved


def _sizes(tiles: TileDivergence, rows: RowDivergence, call: KLCall) -> tuple[Tensor, Tensor]:
    """Compute `tile_lse`, (n, T), and `row_scale`, (n,), of `Saved`.

    Args:
        tiles: for "jsd" with Σ p·u in place of the divergence, and the deviation of u.
    """
    behind = tiles.lse - rows.logsumexp[:, None]
    p = behind.exp()
    if call.direction == "jsd":
        total = (1 - call.beta) * (tiles.divergence - p * rows.center[:, None])
        within = (1 - call.beta) * tiles.deviation
    else:
        q = (tiles.ref_lse - rows.ref_logsumexp[:, None]).exp()
        if call.direction == "forward":
            total, within = p - q, torch.minimum(p, q) * tiles.deviation
        else:
            d = weighable_((tiles.lse - tiles.ref_lse) - rows.shift[:, None], call.direction, p, q)
            total = p * (d + tiles.divergence - rows.divergence[:, None])
            within = p * tiles.deviation
    total = total.abs()
    size = torch.maximum(total, within - total).sum(1)
    return ((total + within) / size[:, None]).log() + rows.logsumexp[:, None], size


def backward(
    call: KLCall,
    rows: RowDivergence,
    gradients: DivergenceGradients,
    wanted: Wanted,
    saved: Saved,
    certificate: Certificate,
    plan: HeadPlan,
) -> HeadGradients:
    """Compute gradients, and fill the certificate."""
    # The center of a shard's part of a larger divergence is zero: the log-sum-exp brings the rest.
    center = rows.center if call.logsumexp is None else torch.zeros_like(rows.center)
    of_rows = DivergenceRows(*rows[1:4], center, *gradients)
    if saved.tile_lse.numel() and gradients.logsumexp is None:
        result = _sampled(call, of_rows, wanted, saved, certificate, plan)
        if result is not None:
            return result
        certificate.fill_exact()
    index = gradients.live(call).nonzero().squeeze(1)
    chosen = DivergenceRows(*(None if t is None else t[index] for t in of_rows))  # type: ignore[arg-type]
    like, vocabulary = call.student.hidden, call.student.vocabulary
    columns = dense_columns(Workload(index.numel(), vocabulary, like.dtype), TILE)
    result = HeadGradients(
        *divergence_gradients(_with_unit_strides(call.rows(index)), chosen, wanted, columns=columns)
    )
    if result.hidden is None:
        return result
    hidden = torch.zeros_like(like).index_copy_(0, index, result.hidden.to(like.dtype))
    return result._replace(hidden=hidden)


def _sampled(
    call: KLCall,
    of_rows: DivergenceRows,
    wanted: Wanted,
    saved: Saved,
    certificate: Certificate,
    plan: HeadPlan,
) -> HeadGradients | None:
    """Select pairs as for rows whose probabilities are the tiles' shares of the gradient's l1 norm."""
    upstream, lse = of_rows.of_divergence, of_rows.logsumexp
    assert upstream is not None
    size = torch.where(upstream == 0, 0, upstream * saved.row_scale)
    nothing = lse.new_empty(0)
    statistics = RowStatistics(torch.zeros_like(lse), lse, *5 * (nothing,))
    pair = _with_unit_strides(call)
    coefficients = row_coefficients(pair.student, statistics, RowGradients(None, size))
    divergence = Divergence(pair, of_rows._replace(of_divergence=upstream.contiguous()))
    return sampled_backward(pair.student, coefficients, saved.tile_lse, plan, wanted, certificate, divergence)


def _with_unit_strides(call: KLCall) -> KLCall:
    student, reference = with_unit_stride(call.student), with_unit_stride(call.reference)
    return call._replace(student=student, reference=reference)


def _folded(tiles: TileDivergence, call: KLCall) -> RowDivergence:
    """Apply the chain rule of the KL over the tiles."""
    found = []
    for lse, ref_lse, within in zip(*(part.split(_FOLDED_ROWS) for part in tiles[:3]), strict=True):
        whole = distributions(lse.clone(), ref_lse.clone(), call._replace(logsumexp=None))
        p, q, d = whole[:3]
        if call.direction == "forward":
            terms = divergence_terms(q, p, -d).addcmul_(q, within)
        else:
            terms = divergence_terms(p, q, d).addcmul_(p, within)
        divergence = terms.sum(1)
        found.append(RowDivergence(divergence, *whole[3:], divergence))
    return RowDivergence(*map(torch.cat, zip(*found, strict=True)))
