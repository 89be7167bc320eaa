"""The head on a CUDA device: the kernels, and the bookkeeping around them.

Rows without work are sorted behind the others by a permutation that stays on the device, and the kernels stop
at a count that stays there too: nothing waits for the host in the forward.

The backward asks the host once: the dense path for how many rows have a gradient, the sparse path, after its
kernels are launched, whether its lists overflowed. While a CUDA graph is captured it does not ask: the dense
path works on all rows, and an overflow turns the gradient into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.head.plan import HeadPlan
from grpo_fast.head.problem import HeadGradients, HeadProblem, Request, RowGradients, RowStatistics
from grpo_fast.kernels import TILE
from grpo_fast.kernels.dense import LogitGradient, dense_backward
from grpo_fast.kernels.forward import Wanted, row_results, tile_statistics
from grpo_fast.kernels.select import select_pairs
from grpo_fast.kernels.sparse import sparse_backward


@dataclass(frozen=True)
class State:
    """What the backward needs of the forward, besides the statistics."""

    tile_lse: Tensor  # (T, N) float32, rows in sorted order
    order: Tensor  # (N,) int64: a permutation, rows with work first
    count: Tensor  # () int32: rows with work

    @classmethod
    def fake(cls, problem: HeadProblem) -> State:
        """Shapes and dtypes alone."""
        rows, tiles = problem.hidden.shape[0], (problem.vocabulary + TILE - 1) // TILE
        return cls(
            tile_lse=problem.hidden.new_empty((tiles, rows), dtype=torch.float32),
            order=problem.targets.new_empty(rows),
            count=problem.targets.new_empty((), dtype=torch.int32),
        )


def forward(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, State]:
    """Every row's statistics, zero for ignored rows."""
    order, count = _rows_with_work_first(problem.targets)
    rows = _with_unit_stride(problem.rows(order))
    if rows.hidden.shape[0] == 0:
        return _no_statistics(problem), State.fake(problem)
    wanted = Wanted(request.entropy, request.mean_logit, request.max_logit, request.log_sum_sq)
    tiles = tile_statistics(
        rows.hidden,
        rows.weight,
        rows.targets,
        count,
        bias=rows.bias,
        inv_temperature=rows.inv_temperature,
        logit_scale=rows.logit_scale,
        softcap=rows.softcap,
        wanted=wanted,
        tile=plan.forward_tile,
    )
    results = row_results(tiles, rows.targets, order, count, problem.vocabulary)
    empty = results.logprob.new_empty
    statistics = RowStatistics(
        *(
            empty(0) if value is None else value
            for value in (
                results.logprob,
                results.logsumexp,
                results.entropy,
                results.mean_logit,
                results.max_logit,
                results.target_logit,
                results.log_sum_sq,
            )
        )
    )
    return statistics, State(tiles.lse, order, count)


def backward(
    problem: HeadProblem,
    statistics: RowStatistics,
    gradients: RowGradients,
    state: State,
    plan: HeadPlan,
    *,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """Gradients, and the certificate's numbers where something was left out."""
    sorted_rows = _SortedRows.gather(problem, statistics, gradients, state.order)
    needs = {"need_hidden": need_hidden, "need_weight": need_weight, "need_bias": need_bias}
    if problem.hidden.shape[0] == 0 or plan.backward == "dense":
        result, certificate = _dense(sorted_rows, plan, **needs), None
    else:
        result, certificate = _sparse(sorted_rows, state.tile_lse, plan, **needs)
    hidden = result.hidden
    if hidden is not None:
        hidden = torch.empty_like(hidden).index_copy_(0, state.order, hidden)
    return HeadGradients(hidden, result.weight, result.bias), certificate


@dataclass(frozen=True)
class _SortedRows:
    """Everything per row in the forward's order; None where there is no upstream gradient."""

    problem: HeadProblem
    logprob: Tensor  # (N,)
    logsumexp: Tensor
    entropy: Tensor | None
    upstream: RowGradients

    @classmethod
    def gather(
        cls, problem: HeadProblem, statistics: RowStatistics, gradients: RowGradients, order: Tensor
    ) -> _SortedRows:
        return cls(
            problem=_with_unit_stride(problem.rows(order)),
            logprob=statistics.logprob[order],
            logsumexp=statistics.logsumexp[order],
            entropy=None if gradients.entropy is None else statistics.entropy[order],
            upstream=gradients.rows(order),
        )

    def rows(self, index: Tensor) -> _SortedRows:
        return _SortedRows(
            self.problem.rows(index),
            self.logprob[index],
            self.logsumexp[index],
            None if self.entropy is None else self.entropy[index],
            self.upstream.rows(index),
        )

    def live(self) -> Tensor:
        """(N,) bool: rows with work and an upstream gradient."""
        upstream = self.upstream.live_rows()
        working = self.problem.targets >= 0
        return torch.zeros_like(working) if upstream is None else working & upstream

    def logit_gradient(self) -> LogitGradient:
        """Coefficients of dL/dz; rows without work have zeros."""
        zero = torch.zeros_like(self.logprob)
        live = self.live()

        def upstream(gradient: Tensor | None) -> Tensor:
            return zero if gradient is None else torch.where(live, gradient, zero)

        of_logprob = torch.where(
            self.problem.targets < self.problem.vocabulary, upstream(self.upstream.logprob), zero
        )
        of_logsumexp = upstream(self.upstream.logsumexp)
        p = self.logprob.exp()
        target = -of_logprob * self.logprob.expm1() + of_logsumexp * p
        of_entropy = None
        if self.upstream.entropy is not None:
            of_entropy = upstream(self.upstream.entropy)
            surprise = self.logprob.clamp_min(-500.0) + self.entropy
            target = target - of_entropy * p * surprise
        mean = self.upstream.mean_logit
        return LogitGradient(
            logsumexp=self.logsumexp,
            mass=of_logsumexp - of_logprob,
            target=target,
            entropy=self.entropy,
            entropy_gradient=of_entropy,
            mean=None if mean is None else upstream(mean) / self.problem.vocabulary,
        )


def _dense(
    rows: _SortedRows, plan: HeadPlan, *, need_hidden: bool, need_weight: bool, need_bias: bool
) -> HeadGradients:
    """Exact, over the rows with a gradient."""
    index = None if _capturing(rows.logprob) else rows.live().nonzero().squeeze(1)
    chosen = rows if index is None else rows.rows(index)
    problem = chosen.problem
    result = dense_backward(
        problem.hidden,
        problem.weight,
        problem.targets,
        chosen.logit_gradient(),
        bias=problem.bias,
        inv_temperature=problem.inv_temperature,
        logit_scale=problem.logit_scale,
        softcap=problem.softcap,
        tile=plan.backward_tile,
        columns=plan.dense_columns,
        need_hidden=need_hidden,
        need_weight=need_weight,
        need_bias=need_bias,
    )
    hidden = result.hidden
    if hidden is not None:
        hidden = hidden.to(problem.hidden.dtype)
        if index is not None:
            hidden = torch.zeros_like(rows.problem.hidden).index_copy_(0, index, hidden)
    return HeadGradients(hidden, result.weight, result.bias)


def _sparse(
    rows: _SortedRows,
    tile_lse: Tensor,
    plan: HeadPlan,
    *,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """From the live pairs alone; dense where they are too many for the sparse path to pay."""
    problem = rows.problem
    g_logprob = rows.upstream.logprob
    pairs = select_pairs(
        tile_lse,
        rows.logsumexp,
        problem.targets,
        rows.logprob,
        torch.zeros_like(rows.logprob) if g_logprob is None else _where_present(problem, g_logprob),
        vocabulary=problem.vocabulary,
        tolerance=plan.tolerance,
        itemsize=problem.hidden.element_size(),
        g_logsumexp=rows.upstream.logsumexp,
    )
    result = sparse_backward(
        problem.hidden,
        problem.weight,
        problem.targets,
        rows.logsumexp,
        pairs,
        bias=problem.bias,
        inv_temperature=problem.inv_temperature,
        logit_scale=problem.logit_scale,
        softcap=problem.softcap,
        want_hidden=need_hidden,
        want_weight=need_weight,
        want_bias=need_bias,
    )
    found = HeadGradients(result.hidden, result.weight, result.bias)
    if _capturing(rows.logprob):
        poison = torch.where(result.dense > 0, torch.nan, 0.0)
        for gradient, missing in ((found.hidden, 1), (found.weight, 0), (found.bias, 0)):
            if gradient is not None:
                gradient += poison[missing].to(gradient.dtype)
        return found, pairs.metrics(result.left_out)
    nothing_written, no_hidden = result.dense.tolist()
    if nothing_written:
        exact = _dense(rows, plan, need_hidden=need_hidden, need_weight=need_weight, need_bias=need_bias)
        return exact, None
    if no_hidden and need_hidden:
        exact = _dense(rows, plan, need_hidden=True, need_weight=False, need_bias=False)
        found = HeadGradients(exact.hidden, found.weight, found.bias)
    return found, pairs.metrics(result.left_out)


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
    return HeadProblem(
        problem.hidden,
        problem.weight.contiguous(),
        problem.targets,
        problem.bias,
        problem.inv_temperature,
        problem.logit_scale,
        problem.softcap,
    )


def _where_present(problem: HeadProblem, gradient: Tensor) -> Tensor:
    """A target in another shard has no log-probability here, so nothing flows back through it."""
    return torch.where(problem.targets < problem.vocabulary, gradient, 0)


def _no_statistics(problem: HeadProblem) -> RowStatistics:
    return RowStatistics(*(problem.hidden.new_empty(0, dtype=torch.float32) for _ in range(7)))


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
