"""The head on a CUDA device: the kernels, and the bookkeeping around them.

Rows without work are sorted behind the others by a permutation that stays on the device, and the kernels stop
at a count that stays there too: nothing waits for the host in the forward.

The backward asks the host once, for cuBLAS must know its sizes: the dense path for how many rows have a
gradient; the sparse path, after all its kernels are launched, whether its lists overflowed. Only then are
rows that are live nearly everywhere set apart for the dense path, and it asks again. With what the forward
kept it does not ask. While a CUDA graph is captured it does not either: the dense path works on all rows, and
an overflow turns the gradient into NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.head.plan import HeadPlan
from grpo_fast.head.problem import (
    HeadGradients,
    HeadProblem,
    LogitGradient,
    Request,
    RowGradients,
    RowStatistics,
    State,
    Wanted,
)
from grpo_fast.kernels import TILE
from grpo_fast.kernels.dense import Kept, dense_backward, row_aligned
from grpo_fast.kernels.forward import row_results, tile_statistics
from grpo_fast.kernels.select import select_pairs
from grpo_fast.kernels.sparse import sparse_backward


def allocate_state(problem: HeadProblem, keep: bool) -> State:
    """What `forward` returns, not yet filled."""
    rows, tiles = problem.hidden.shape[0], -(-problem.vocabulary // TILE)
    float32 = torch.float32
    state = State.empty(problem)._replace(
        tile_lse=problem.hidden.new_empty((tiles, rows), dtype=float32),
        order=problem.targets.new_empty(rows),
        working=problem.targets.new_empty((), dtype=torch.int32),
    )
    if not keep:
        return state
    return state._replace(
        exponentials=row_aligned(rows, problem.vocabulary, problem.hidden),
        maximum=problem.hidden.new_empty((tiles, rows), dtype=float32),
    )


def forward(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, State]:
    """Every row's statistics, zero for ignored rows."""
    if problem.hidden.shape[0] == 0:
        return RowStatistics.allocate(problem, request), allocate_state(problem, plan.keep)
    order, working = _rows_with_work_first(problem.targets)
    rows = _with_unit_stride(problem.rows(order))
    exponentials = row_aligned(rows.hidden.shape[0], problem.vocabulary, rows.hidden) if plan.keep else None
    tiles = tile_statistics(
        rows,
        working,
        tile=plan.forward_tile,
        entropy=request.entropy,
        mean=request.mean_logit,
        maximum=request.max_logit,
        squares=request.log_sum_sq,
        keep=exponentials,
    )
    reported = tiles if request.max_logit else tiles._replace(maximum=None)
    statistics = RowStatistics(*row_results(reported, rows.targets, order, working, problem.vocabulary))
    state = State.empty(problem)._replace(tile_lse=tiles.lse, order=order, working=working)
    if exponentials is not None:
        state = state._replace(exponentials=exponentials, maximum=tiles.maximum)
    return statistics, state


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    state: State,
    plan: HeadPlan,
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """Gradients, and the certificate's numbers where something was left out."""
    order = state.order
    rows = _with_unit_stride(problem.rows(order))
    of_rows = LogitGradient.of(problem, statistics, gradients).rows(order)
    certificate = None
    if state.exponentials.numel() and not gradients.is_dense:
        result = _dense(rows, of_rows, plan, wanted, Kept(state.exponentials, state.maximum))
    elif problem.hidden.shape[0] == 0 or plan.backward == "dense":
        result = _dense(rows, of_rows, plan, wanted)
    else:
        result, certificate = _sparse(rows, of_rows, state.tile_lse, plan, wanted)
    if result.hidden is not None:
        result = result._replace(hidden=torch.empty_like(result.hidden).index_copy_(0, order, result.hidden))
    return result, certificate


def _dense(
    problem: HeadProblem, of_rows: LogitGradient, plan: HeadPlan, wanted: Wanted, kept: Kept | None = None
) -> HeadGradients:
    """Exact, over the rows with a gradient; with what the forward kept, over all rows: nobody is asked."""
    chosen, like, index = problem, problem.hidden, None
    if kept is not None:
        # What an ignored row holds is anything, and zero times NaN is not zero. The rows are a copy.
        problem.hidden.masked_fill_(~of_rows.live()[:, None], 0)
    elif not _capturing(like):
        index = of_rows.live().nonzero().squeeze(1)
        chosen, of_rows = problem.rows(index), of_rows.rows(index)
    tile, columns = plan.backward_tile, plan.dense_columns
    result = HeadGradients(*dense_backward(chosen, of_rows, wanted, tile=tile, columns=columns, kept=kept))
    if result.hidden is None:
        return result
    hidden = result.hidden.to(like.dtype)
    if index is not None:
        hidden = torch.zeros_like(like).index_copy_(0, index, hidden)
    return result._replace(hidden=hidden)


def _sparse(
    problem: HeadProblem,
    of_rows: LogitGradient,
    tile_lse: Tensor,
    plan: HeadPlan,
    wanted: Wanted,
    *,
    split_rows: bool = False,
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """From the live pairs; where the lists overflow, once more without the rows that crowd them.

    A crowded row costs less among the pairs than on the dense path, whose price is a pass over the weight and
    its gradient however few rows it is for.
    """
    pairs = select_pairs(
        problem, of_rows, tile_lse, tolerance=plan.tolerance, split_rows=split_rows, config=plan.sparse
    )
    result = sparse_backward(problem, of_rows.logsumexp, pairs, wanted)
    found = HeadGradients(result.hidden, result.weight, result.bias)
    certificate = pairs.metrics(result.left_out)
    if _capturing(problem.hidden):
        _poison(found, result.dense)
        return found, certificate
    missing = torch.cat([result.dense, pairs.dense_rows.sum(0, keepdim=True)])
    nothing_written, no_hidden, dense_rows = missing.tolist()
    if nothing_written:  # pairs overflowed: never once rows are set apart
        del pairs, result, found  # the second pass needs as much memory
        return _sparse(problem, of_rows, tile_lse, plan, wanted, split_rows=True)
    if dense_rows:
        index = pairs.dense_rows.nonzero().squeeze(1)
        into = wanted._replace(into_weight=found.weight, into_bias=found.bias)
        exact = _dense(problem.rows(index), of_rows.rows(index), plan, into)
        if found.hidden is not None and exact.hidden is not None:
            exact = exact._replace(hidden=found.hidden.index_copy_(0, index, exact.hidden))
        found = exact
    if no_hidden and wanted.hidden:
        alone = Wanted(hidden=True, weight=False, bias=False)
        of_hidden = None
        if split_rows:
            again = _dense(problem, of_rows, plan, alone)
        else:
            again, of_hidden = _sparse(problem, of_rows, tile_lse, plan, alone, split_rows=True)
        found = found._replace(hidden=again.hidden)
        certificate = _worse(of_hidden, pairs.metrics() if wanted.weight or wanted.bias else None)
    return found, certificate


def _worse(first: dict[str, Tensor] | None, second: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Number by number; None: nothing was left out."""
    if first is None or second is None:
        return first or second
    return {name: torch.maximum(first[name], second[name]) for name in first}


def _poison(found: HeadGradients, dense: Tensor) -> None:
    """NaN where a list overflowed, for while a graph is captured nobody can be asked."""
    poison = torch.where(dense > 0, torch.nan, 0.0)
    for gradient, missing in zip(found, (1, 0, 0), strict=True):
        if gradient is not None:
            gradient += poison[missing].to(gradient.dtype)


def _rows_with_work_first(targets: Tensor) -> tuple[Tensor, Tensor]:
    """A stable permutation, (N,) int64, and how many rows have work, () int32."""
    working = targets >= 0
    front = working.cumsum(0)
    back = (~working).cumsum(0)
    count = working.sum()
    place = torch.where(working, front - 1, count + back - 1)
    order = torch.empty_like(targets)
    order.scatter_(0, place, torch.arange(targets.numel(), device=targets.device))
    return order, count.to(torch.int32)


def _with_unit_stride(problem: HeadProblem) -> HeadProblem:
    """The kernels read along H; a weight with another layout is copied."""
    if problem.weight.stride(1) == 1:
        return problem
    return problem._replace(weight=problem.weight.contiguous())


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
