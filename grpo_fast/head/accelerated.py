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

from grpo_fast.head.outputs import Certificate
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
from grpo_fast.kernels.coefficients import row_coefficients
from grpo_fast.kernels.dense import dense_backward, row_aligned
from grpo_fast.kernels.exponentials import Kept, kept_backward, settle
from grpo_fast.kernels.finalise import row_results
from grpo_fast.kernels.forward import gather_rows, tile_statistics
from grpo_fast.kernels.select import select_live
from grpo_fast.kernels.sparse import SparseGradients, sparse_backward


def allocate_state(problem: HeadProblem, plan: HeadPlan) -> State:
    """What `forward` returns, not yet filled."""
    if plan.jacobian:
        return State.empty(problem, jacobian=True)
    rows, tiles = problem.hidden.shape[0], -(-problem.vocabulary // TILE)
    float32 = torch.float32
    state = State.empty(problem)._replace(tile_lse=row_aligned(rows, tiles, problem.hidden, float32))
    if not plan.keep:
        return state
    return state._replace(
        exponentials=row_aligned(rows, problem.vocabulary, problem.hidden),
        share=problem.hidden.new_empty(rows, dtype=float32),
    )


def forward(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, State]:
    """Every row's statistics, zero for ignored rows."""
    if problem.hidden.shape[0] == 0:
        return RowStatistics.allocate(problem, request), allocate_state(problem, plan)
    problem = _with_unit_stride(problem)
    if not plan.jacobian:
        return _forward(problem, request, plan)
    state, statistics = State.empty(problem, jacobian=True), []
    for start in range(0, problem.hidden.shape[0], plan.jacobian_rows):
        part = slice(start, start + plan.jacobian_rows)
        found, state.jacobian[part] = _with_jacobian(problem.rows(part), request, plan)
        statistics.append(found)
    return RowStatistics(*map(torch.cat, zip(*statistics, strict=True))), state


def _with_jacobian(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, Tensor]:
    statistics, state = _forward(problem, request, plan)
    logprob = statistics.logprob
    mass = (problem.targets < problem.vocabulary).to(logprob.dtype).neg()
    rows = LogitGradient(statistics.logsumexp, mass=mass, target=-logprob.expm1(), logprob=logprob)
    kept = Kept(state.exponentials, state.share)
    wanted = Wanted(hidden=True, weight=False, bias=False)
    return statistics, kept_backward(problem, rows, wanted, kept, hidden_dtype=torch.float32)[0]


def _forward(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, State]:
    gathered = gather_rows(problem)
    keep = None
    if plan.keep or plan.jacobian:
        exponentials = row_aligned(problem.hidden.shape[0], problem.vocabulary, problem.hidden)
        keep = exponentials, gathered.target_logit
    tiles = tile_statistics(
        problem,
        gathered,
        tile=plan.forward_tile,
        entropy=request.entropy,
        mean=request.mean_logit,
        maximum=request.max_logit,
        squares=request.log_sum_sq,
        keep=keep,
    )
    statistics = RowStatistics(*row_results(tiles, problem, gathered.target_logit))
    state = State.empty(problem)._replace(tile_lse=tiles.lse)
    if keep is not None:
        del gathered
        exponentials, share = settle(problem, *keep, statistics.logsumexp, plan.forward_tile)
        state = state._replace(exponentials=exponentials, share=share)
    return statistics, state


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    wanted: Wanted,
    state: State,
    certificate: Certificate,
    plan: HeadPlan,
) -> HeadGradients:
    """Gradients; fills the certificate."""
    problem = _with_unit_stride(problem)
    if state.exponentials.numel() and gradients.follows_softmax:
        certificate.fill(None)
        of_rows = LogitGradient.of(problem, statistics, gradients)
        kept = Kept(state.exponentials, state.share)
        return HeadGradients(*kept_backward(problem, of_rows, wanted, kept))
    if plan.backward == "sparse" and problem.hidden.shape[0] and not _capturing(problem.hidden):
        return _sparse(problem, statistics, gradients, state.tile_lse, plan, wanted, certificate)
    certificate.fill(None)
    return _dense(problem, LogitGradient.of(problem, statistics, gradients), plan, wanted)


def _dense(problem: HeadProblem, of_rows: LogitGradient, plan: HeadPlan, wanted: Wanted) -> HeadGradients:
    """Exact, over the rows with a gradient; in a captured graph over all rows, for nobody can be asked."""
    chosen, like, index = problem, problem.hidden, None
    if _capturing(like):
        # What an ignored row holds is anything, and zero times NaN is not zero.
        chosen = problem._replace(hidden=like.masked_fill(~of_rows.live()[:, None], 0))
    else:
        index = of_rows.live().nonzero().squeeze(1)
        chosen, of_rows = problem.rows(index), of_rows.rows(index)
    tile, columns = plan.backward_tile, plan.dense_columns
    result = HeadGradients(*dense_backward(chosen, of_rows, wanted, tile=tile, columns=columns))
    if result.hidden is None:
        return result
    hidden = result.hidden.to(like.dtype)
    if index is not None:
        hidden = torch.zeros_like(like).index_copy_(0, index, hidden)
    return result._replace(hidden=hidden)


def _sparse(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    tile_lse: Tensor,
    plan: HeadPlan,
    wanted: Wanted,
    certificate: Certificate,
) -> HeadGradients:
    """From the pairs that are kept, or exactly where that would be too many."""
    (rows, tiles), config = tile_lse.shape, plan.sparse
    coefficients = row_coefficients(problem, statistics, gradients)
    live = select_live(problem, coefficients, tile_lse, tolerance=plan.tolerance)
    room = _read_later(live.row_ends[-1])

    def form(capacity: int) -> SparseGradients:
        return sparse_backward(
            problem, coefficients, live, wanted, certificate.values, capacity=capacity, config=config
        )

    usual, most = config.usual_pairs(rows, tiles), config.most_pairs(rows, tiles)
    result = form(usual)
    if (pairs := room()) > usual:
        del result
        if pairs > most:
            certificate.fill(None)
            return _dense(problem, LogitGradient.of(problem, statistics, gradients), plan, wanted)
        result = form(pairs)
    return HeadGradients(result.hidden, result.weight, result.bias)


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


def _with_unit_stride(problem: HeadProblem) -> HeadProblem:
    """The kernels read along H; operands with another layout are copied."""
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in problem[:2])
    return problem._replace(hidden=hidden, weight=weight)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
