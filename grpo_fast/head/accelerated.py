"""The head on a CUDA device: the kernels, and the bookkeeping around them.

Nothing waits for the host in the forward. The sparse backward asks the host once how many pairs are live: the
copy begins right after the selection, and is waited for after all kernels are launched. Where there are more
than had room, their lists are made again with as much as they need; where that would be too much, the rows
that are live in the most tiles are set apart for the dense path first. The dense path asks for the rows that
have a gradient, as cuBLAS must know its sizes; with what the forward kept it does not ask.

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
from grpo_fast.kernels.forward import gather_rows, row_results, tile_statistics
from grpo_fast.kernels.select import Live, select_live
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
        keep = exponentials, gathered.target_logit.clone()  # a maximum writes the targets' logits again
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
    if state.exponentials.numel() and not gradients.is_dense:
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
    """From the live pairs, and exactly for rows set apart.

    A crowded row costs less among the pairs than on the dense path, whose price is a pass over the weight and
    its gradient however few rows it is for.
    """
    (rows, tiles), config = tile_lse.shape, plan.sparse
    coefficients = row_coefficients(problem, statistics, gradients)
    usual, most = config.usual_pairs(rows, tiles), config.most_pairs(rows, tiles)

    def select(row_tiles: int) -> tuple[Live, Callable[[], list[int]]]:
        live = select_live(problem, coefficients, tile_lse, tolerance=plan.tolerance, row_tiles=row_tiles)
        return live, _read_later(live.found)

    def form(live: Live, capacity: int) -> SparseGradients:
        return sparse_backward(
            problem, coefficients, live, wanted, certificate.values,
            tolerance=plan.tolerance, capacity=capacity, config=config,
        )  # fmt: skip

    live, found = select(tiles)
    result = form(live, usual)
    pairs, set_apart = found()
    if pairs > usual:
        del result
        if pairs > most:
            live, found = select(most // rows)
            pairs, set_apart = found()
        result = form(live, max(pairs, 1))
    gradient = HeadGradients(result.hidden, result.weight, result.bias)
    if set_apart:
        index = live.dense.nonzero().squeeze(1)
        of_rows = LogitGradient.of(problem, statistics, gradients).rows(index)
        into = wanted._replace(into_weight=result.weight, into_bias=result.bias)
        exact = _dense(problem.rows(index), of_rows, plan, into)
        if gradient.hidden is not None and exact.hidden is not None:
            exact = exact._replace(hidden=gradient.hidden.index_copy_(0, index, exact.hidden))
        gradient = exact
    return gradient


def _read_later(numbers: Tensor) -> Callable[[], list[int]]:
    """Begins to copy numbers to the host. What is called for them waits for what was launched until now, not
    for what is launched meanwhile.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return wait


def _with_unit_stride(problem: HeadProblem) -> HeadProblem:
    """The kernels read along H; operands with another layout are copied."""
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in problem[:2])
    return problem._replace(hidden=hidden, weight=weight)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
