"""The head on a CUDA device: the kernels, and the bookkeeping around them.

Nothing waits for the host in the forward. The sparse backward asks the host once for how many pairs there
must be room: the copy begins right after the selection, and is waited for after all kernels are launched.
Where there was less room, the lists are made again with as much as they need; where that would be too much,
the whole batch is exact. What decides is known before anything is drawn, so the gradient stays unbiased.
The dense path asks for the rows that have a gradient, as cuBLAS must know its sizes; with what the forward
kept it does not ask.

While a CUDA graph is captured nobody can be asked: the dense path works on all rows.
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
    SavedForBackward,
    Wanted,
)
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import HeadPlan
from grpo_fast.kernels import TILE
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients
from grpo_fast.kernels.dense import dense_backward, row_aligned
from grpo_fast.kernels.exponentials import SavedExp, kept_backward, normalise
from grpo_fast.kernels.finalise import row_results
from grpo_fast.kernels.forward import gather_rows, tile_statistics
from grpo_fast.kernels.select import select_live
from grpo_fast.kernels.sparse import sparse_backward
from grpo_fast.kernels.two_heads import Divergence


def allocate_saved(call: HeadCall, plan: HeadPlan) -> SavedForBackward:
    """What `forward` returns, not yet filled."""
    if plan.jacobian:
        return SavedForBackward.empty(call, jacobian=True)
    rows, tiles = call.hidden.shape[0], -(-call.vocabulary // TILE)
    float32 = torch.float32
    saved = SavedForBackward.empty(call)._replace(tile_lse=row_aligned(rows, tiles, call.hidden, float32))
    if not plan.keep:
        return saved
    return saved._replace(
        exponentials=row_aligned(rows, call.vocabulary, call.hidden),
        share=call.hidden.new_empty(rows, dtype=float32),
    )


def forward(call: HeadCall, plan: HeadPlan) -> tuple[RowStatistics, SavedForBackward]:
    """Every row's statistics, zero for ignored rows."""
    if call.hidden.shape[0] == 0:
        return RowStatistics.allocate(call), allocate_saved(call, plan)
    call = with_unit_stride(call)
    if not plan.jacobian:
        return _forward(call, plan)
    saved, statistics = SavedForBackward.empty(call, jacobian=True), []
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
    kept = SavedExp(saved.exponentials, saved.share)
    wanted = Wanted(hidden=True, weight=False, bias=False)
    return statistics, kept_backward(call, rows, wanted, kept, hidden_dtype=torch.float32)[0]


def _forward(call: HeadCall, plan: HeadPlan) -> tuple[RowStatistics, SavedForBackward]:
    gathered = gather_rows(call)
    keep = None
    if plan.keep or plan.jacobian:
        exponentials = row_aligned(call.hidden.shape[0], call.vocabulary, call.hidden)
        keep = exponentials, gathered.target_logit
    tiles = tile_statistics(call, gathered, tile=plan.forward_tile, keep=keep)
    statistics = RowStatistics(*row_results(tiles, call, gathered.target_logit))
    saved = SavedForBackward.empty(call)._replace(tile_lse=tiles.lse)
    if keep is not None:
        del gathered
        exponentials, share = normalise(call, *keep, statistics.logsumexp, plan.forward_tile)
        saved = saved._replace(exponentials=exponentials, share=share)
    return statistics, saved


def backward(
    call: HeadCall,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    saved: SavedForBackward,
    certificate: Certificate,
    plan: HeadPlan,
) -> HeadGradients:
    """Gradients; fills the certificate."""
    call = with_unit_stride(call)
    if saved.exponentials.numel() and gradients.follows_softmax:
        certificate.fill_exact()
        of_rows = LogitGradient.of(call, statistics, gradients)
        kept = SavedExp(saved.exponentials, saved.share)
        return HeadGradients(*kept_backward(call, of_rows, wanted, kept))
    if plan.backward == "sparse":
        coefficients = row_coefficients(call, statistics, gradients)
        result = sampled_backward(call, coefficients, saved.tile_lse, plan, wanted, certificate)
        if result is not None:
            return result
    certificate.fill_exact()
    return _dense(call, LogitGradient.of(call, statistics, gradients), plan, wanted)


def _dense(call: HeadCall, of_rows: LogitGradient, plan: HeadPlan, wanted: Wanted) -> HeadGradients:
    """Exact, over the rows with a gradient; in a captured graph over all rows, for nobody can be asked."""
    chosen, like, index = call, call.hidden, None
    if _capturing(like):
        # What an ignored row holds is anything, and zero times NaN is not zero.
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
    """From the pairs that are kept; None where they are too many or nobody can be asked for their number.

    Fills the certificate.

    Args:
        call: its operands have unit stride along H.
        tile_lse: as `select_live` takes it.
        divergence: as `sparse_backward` takes it.
    """
    (rows, tiles), config = tile_lse.shape, plan.sparse
    if rows == 0 or _capturing(tile_lse):
        return None
    live = select_live(call, coefficients, tile_lse, tolerance=plan.tolerance)
    room = _read_later(live.row_ends[-1])

    def form(capacity: int) -> HeadGradients:
        options = {"capacity": capacity, "config": config, "divergence": divergence}
        return HeadGradients(
            *sparse_backward(call, coefficients, live, wanted, certificate.values, **options)
        )

    usual, most = config.usual_pairs(rows, tiles), config.most_pairs(rows, tiles)
    result = form(usual)
    if (pairs := room()) > usual:
        del result
        return None if pairs > most else form(pairs)
    return result


def _read_later(number: Tensor) -> Callable[[], int]:
    """Begins to copy a number to the host. What is called for it waits for what was launched until now, not
    for what is launched meanwhile.
    """
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
    """Copy what the kernels cannot read: hidden states and weight are read along H, and a bias is dense."""
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in call[:2])
    bias = None if call.bias is None else call.bias.contiguous()
    return call._replace(hidden=hidden, weight=weight, bias=bias)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
