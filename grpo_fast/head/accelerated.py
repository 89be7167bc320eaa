"""Run the head's kernels on a CUDA device.

The forward never synchronizes with the host. The sparse backward reads one number on the host, how many pairs
need room: the copy starts right after the selection, and the host waits after all kernels are launched. With
too little room, the lists are built again; beyond `most_density`, the whole batch is exact. That decision
does not depend on the draws, so the gradient stays unbiased. The dense path reads the rows with a gradient,
because cuBLAS needs sizes on the host, unless the forward kept exponentials.

A CUDA graph under capture can read nothing: the dense path then works on all rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fast.head.call import (
    HeadCall,
    HeadGradients,
    LogitGradient,
    RowGradients,
    RowStatistics,
    Saved,
    Wanted,
)
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import HeadPlan
from grpo_fast.kernels import TILE
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients
from grpo_fast.kernels.dense import dense_backward, row_aligned
from grpo_fast.kernels.exponentials import SavedExp, kept_backward, normalize
from grpo_fast.kernels.finalize import row_results
from grpo_fast.kernels.forward import gather_rows, tile_statistics
from grpo_fast.kernels.select import select_live
from grpo_fast.kernels.sparse import sparse_backward
from grpo_fast.kernels.two_heads import Divergence


def allocate_saved(call: HeadCall, plan: HeadPlan) -> Saved:
    """Allocate the tensors that `forward` saves."""
    if plan.jacobian:
        return Saved.empty(call, jacobian=True)
    rows, tiles, float32 = call.hidden.shape[0], -(-call.vocabulary // TILE), torch.float32
    saved = Saved.empty(call)._replace(tile_lse=row_aligned(rows, tiles, call.hidden, float32))
    if plan.keep:
        scale = call.hidden.new_empty(rows, dtype=float32)
        exponentials = row_aligned(rows, call.vocabulary, call.hidden)
        saved = saved._replace(exponentials=exponentials, row_scale=scale)
    return saved


def forward(call: HeadCall, plan: HeadPlan) -> tuple[RowStatistics, Saved]:
    """Compute every row's statistics, zero for ignored rows."""
    if call.hidden.shape[0] == 0:
        return RowStatistics.allocate(call), allocate_saved(call, plan)
    call = with_unit_stride(call)
    if not plan.jacobian:
        return _forward(call, plan)
    saved, statistics = Saved.empty(call, jacobian=True), []
    for start in range(0, call.hidden.shape[0], plan.jacobian_rows):
        part = slice(start, start + plan.jacobian_rows)
        found, saved.jacobian[part] = _with_jacobian(call.rows(part), plan)
        statistics.append(found)
    return RowStatistics(*map(torch.cat, zip(*statistics, strict=True))), saved


def _with_jacobian(call: HeadCall, plan: HeadPlan) -> tuple[RowStatistics, Tensor]:
    statistics, saved = _forward(call, plan)
    logprob = statistics.logprob
    mass = (call.targets < call.vocabulary).to(logprob.dtype).neg()
    rows = LogitGradient(statistics.logsumexp, mass=mass, target=-logprob.expm1(), logprob=logprob)
    kept = SavedExp(saved.exponentials, saved.row_scale)
    wanted = Wanted(hidden=True, weight=False, bias=False)
    return statistics, kept_backward(call, rows, wanted, kept, hidden_dtype=torch.float32)[0]


def _forward(call: HeadCall, plan: HeadPlan) -> tuple[RowStatistics, Saved]:
    gathered = gather_rows(call)
    keep = None
    if plan.keep or plan.jacobian:
        exponentials = row_aligned(call.hidden.shape[0], call.vocabulary, call.hidden)
        keep = exponentials, gathered.target_logit
    tiles = tile_statistics(call, gathered, tile=plan.forward_tile, keep=keep)
    statistics = RowStatistics(*row_results(tiles, call, gathered.target_logit))
    saved = Saved.empty(call)._replace(tile_lse=tiles.lse)
    if keep is not None:
        del gathered
        exponentials, share = normalize(call, *keep, statistics.logsumexp, plan.forward_tile)
        saved = saved._replace(exponentials=exponentials, row_scale=share)
    return statistics, saved


def backward(
    call: HeadCall,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    saved: Saved,
    certificate: Certificate,
    plan: HeadPlan,
) -> HeadGradients:
    """Compute gradients, and fill the certificate."""
    call = with_unit_stride(call)
    if saved.exponentials.numel() and gradients.follows_softmax:
        certificate.fill_exact()
        of_rows = LogitGradient.of(call, statistics, gradients)
        kept = SavedExp(saved.exponentials, saved.row_scale)
        return HeadGradients(*kept_backward(call, of_rows, wanted, kept))
    if plan.backward == "sparse":
        coefficients = row_coefficients(call, statistics, gradients)
        result = sampled_backward(call, coefficients, saved.tile_lse, plan, wanted, certificate)
        if result is not None:
            return result
    certificate.fill_exact()
    return _dense(call, LogitGradient.of(call, statistics, gradients), plan, wanted)


def _dense(call: HeadCall, of_rows: LogitGradient, plan: HeadPlan, wanted: Wanted) -> HeadGradients:
    """Compute exact gradients over the rows with one, or over all rows while a graph is captured."""
    chosen, like, index = call, call.hidden, None
    if _capturing(like):
        # An ignored row may hold NaN, and zero times NaN is not zero.
        chosen = call._replace(hidden=like.masked_fill(~of_rows.live()[:, None], 0))
    else:
        index = of_rows.live().nonzero().squeeze(1)
        chosen, of_rows = call.rows(index), of_rows.rows(index)
    tile, columns = plan.backward_tile, plan.dense_columns
    result = HeadGradients(*dense_backward(chosen, of_rows, wanted, tile=tile, columns=columns))
    if result.hidden is None:
        return result
    hidden = result.hidden.to(like.dtype)
    if index is not None:
        hidden = torch.zeros_like(like).index_copy_(0, index, hidden)
    return result._replace(hidden=hidden)


def sampled_backward(
    call: HeadCall,
    coefficients: RowCoefficients,
    tile_lse: Tensor,
    plan: HeadPlan,
    wanted: Wanted,
    certificate: Certificate,
    divergence: Divergence | None = None,
) -> HeadGradients | None:
    """Compute gradients from the kept pairs, and fill the certificate.

    Args:
        call: its operands have unit stride along H.
        tile_lse: as in `select_live`.
        divergence: as in `sparse_backward`.

    Returns:
        None with too many pairs, or while a CUDA graph is captured.
    """
    (rows, tiles), config = tile_lse.shape, plan.sparse
    if rows == 0 or _capturing(tile_lse):
        return None
    live = select_live(call, coefficients, tile_lse, tolerance=plan.tolerance)
    room = _read_later(live.row_ends[-1])

    def form(capacity: int) -> HeadGradients:
        options = {"capacity": capacity, "config": config, "divergence": divergence}
        return HeadGradients(*sparse_backward(call, live, wanted, certificate.values, **options))

    usual, most = config.usual_pairs(rows, tiles), config.most_pairs(rows, tiles)
    result = form(usual)
    if (pairs := room()) > usual:
        del result
        return None if pairs > most else form(pairs)
    return result


def _read_later(number: Tensor) -> Callable[[], int]:
    """Start to copy a number to the host; the returned function waits for the work launched before."""
    if not number.is_cuda:
        return lambda: int(number)
    host = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> int:
        copied.synchronize()
        return int(host)

    return wait


def with_unit_stride(call: HeadCall) -> HeadCall:
    """Copy operands that the kernels cannot read: a bias must be dense, the others contiguous along H."""
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in call[:2])
    bias = None if call.bias is None else call.bias.contiguous()
    return call._replace(hidden=hidden, weight=weight, bias=bias)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
