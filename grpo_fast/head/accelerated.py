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

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from grpo_fast.head.plan import HeadPlan
from grpo_fast.head.problem import HeadGradients, HeadProblem, Request, RowGradients, RowStatistics
from grpo_fast.kernels import TILE
from grpo_fast.kernels.dense import LogitGradient, dense_backward
from grpo_fast.kernels.forward import Wanted, row_results, tile_statistics
from grpo_fast.kernels.kept import Kept, allocate
from grpo_fast.kernels.select import select_pairs
from grpo_fast.kernels.sparse import sparse_backward


@dataclass(frozen=True)
class State:
    """What the backward needs of the forward, besides the statistics."""

    tile_lse: Tensor  # (T, N) float32, rows in sorted order
    order: Tensor  # (N,) int64: a permutation, rows with work first
    count: Tensor  # () int32: rows with work
    exponentials: Tensor  # (N, V) rows in sorted order, kept for the backward; else empty
    maximum: Tensor  # (T, N) float32, beside them

    def in_order(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def fake(cls, problem: HeadProblem, keep: bool) -> State:
        """Shapes and dtypes alone."""
        rows, tiles = problem.hidden.shape[0], (problem.vocabulary + TILE - 1) // TILE
        return cls(
            tile_lse=problem.hidden.new_empty((tiles, rows), dtype=torch.float32),
            order=problem.targets.new_empty(rows),
            count=problem.targets.new_empty((), dtype=torch.int32),
            exponentials=(
                allocate(rows, problem.vocabulary, problem.hidden) if keep else problem.hidden.new_empty(0)
            ),
            maximum=problem.hidden.new_empty((tiles, rows) if keep else 0, dtype=torch.float32),
        )


def forward(problem: HeadProblem, request: Request, plan: HeadPlan) -> tuple[RowStatistics, State]:
    """Every row's statistics, zero for ignored rows."""
    order, count = _rows_with_work_first(problem.targets)
    rows = _with_unit_stride(problem.rows(order))
    if rows.hidden.shape[0] == 0:
        return _no_statistics(problem), State.fake(problem, plan.keep)
    exponentials = allocate(rows.hidden.shape[0], problem.vocabulary, rows.hidden) if plan.keep else None
    maximum = request.max_logit or plan.keep
    wanted = Wanted(request.entropy, request.mean_logit, maximum, request.log_sum_sq)
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
        keep=exponentials,
    )
    reported = tiles if request.max_logit else replace(tiles, maximum=None)
    results = row_results(reported, rows.targets, order, count, problem.vocabulary)
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
    maximum = tiles.maximum
    if exponentials is None:
        exponentials, maximum = rows.hidden.new_empty(0), tiles.lse.new_empty(0)
    return statistics, State(tiles.lse, order, count, exponentials, maximum)


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
    weight_gradient: Tensor | None = None,
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """Gradients, and the certificate's numbers where something was left out.

    Args:
        weight_gradient: (V, H) existing gradient, any float dtype: the weight's is added to it in place and
            returned as it.
    """
    sorted_rows = _SortedRows.gather(problem, statistics, gradients, state.order)
    wanted = _Wanted(need_hidden, need_weight, need_bias, weight_gradient)
    linear = gradients.entropy is None and gradients.mean_logit is None
    if state.exponentials.numel() and linear:
        kept = Kept(state.exponentials, state.maximum)
        result, certificate = _dense(sorted_rows, plan, wanted, kept), None
    elif problem.hidden.shape[0] == 0 or plan.backward == "dense":
        result, certificate = _dense(sorted_rows, plan, wanted), None
    else:
        result, certificate = _sparse(sorted_rows, state.tile_lse, plan, wanted)
    hidden = result.hidden
    if hidden is not None:
        hidden = torch.empty_like(hidden).index_copy_(0, state.order, hidden)
    return HeadGradients(hidden, result.weight, result.bias), certificate


@dataclass(frozen=True)
class _Wanted:
    """Which gradients, and what those of the parameters are added to; None: they are made."""

    hidden: bool
    weight: bool
    bias: bool
    into_weight: Tensor | None = None
    into_bias: Tensor | None = None


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


def _dense(rows: _SortedRows, plan: HeadPlan, wanted: _Wanted, kept: Kept | None = None) -> HeadGradients:
    """Exact, over the rows with a gradient; with what the forward kept, over all rows: nobody is asked."""
    index = None
    if kept is not None:
        # What an ignored row holds is anything, and zero times NaN is not zero. The rows are a copy.
        rows.problem.hidden.masked_fill_(~rows.live()[:, None], 0)
    elif not _capturing(rows.logprob):
        index = rows.live().nonzero().squeeze(1)
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
        need_hidden=wanted.hidden,
        need_weight=wanted.weight,
        need_bias=wanted.bias,
        weight_gradient=wanted.into_weight,
        bias_gradient=wanted.into_bias,
        kept=kept,
    )
    hidden = result.hidden
    if hidden is not None:
        hidden = hidden.to(problem.hidden.dtype)
        if index is not None:
            hidden = torch.zeros_like(rows.problem.hidden).index_copy_(0, index, hidden)
    return HeadGradients(hidden, result.weight, result.bias)


def _sparse(
    rows: _SortedRows, tile_lse: Tensor, plan: HeadPlan, wanted: _Wanted, *, split_rows: bool = False
) -> tuple[HeadGradients, dict[str, Tensor] | None]:
    """From the live pairs; where the lists overflow, once more without the rows that crowd them.

    A crowded row costs less among the pairs than on the dense path, whose price is a pass over the weight and
    its gradient however few rows it is for.
    """
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
        split_rows=split_rows,
        config=plan.sparse,
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
        want_hidden=wanted.hidden,
        want_weight=wanted.weight,
        want_bias=wanted.bias,
        weight_gradient=wanted.into_weight,
        bias_gradient=wanted.into_bias,
    )
    found = HeadGradients(result.hidden, result.weight, result.bias)
    certificate = pairs.metrics(result.left_out)
    if _capturing(rows.logprob):
        _poison(found, result.dense)
        return found, certificate
    missing = torch.cat([result.dense, pairs.dense_rows.sum(0, keepdim=True)])
    nothing_written, no_hidden, dense_rows = missing.tolist()
    if nothing_written:  # pairs overflowed: never once rows are set apart
        del pairs, result, found  # the second pass needs as much memory
        return _sparse(rows, tile_lse, plan, wanted, split_rows=True)
    if dense_rows:
        found = _with_dense_rows(found, rows, pairs.dense_rows, plan, wanted)
    if no_hidden and wanted.hidden:
        alone = _Wanted(hidden=True, weight=False, bias=False)
        if split_rows:
            again, of_hidden = _dense(rows, plan, alone), None
        else:
            again, of_hidden = _sparse(rows, tile_lse, plan, alone, split_rows=True)
        found = replace(found, hidden=again.hidden)
        certificate = _worse(of_hidden, pairs.metrics() if wanted.weight or wanted.bias else None)
    return found, certificate


def _worse(first: dict[str, Tensor] | None, second: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Number by number; None: nothing was left out."""
    if first is None or second is None:
        return first or second
    return {name: torch.maximum(first[name], second[name]) for name in first}


def _with_dense_rows(
    found: HeadGradients, rows: _SortedRows, dense: Tensor, plan: HeadPlan, wanted: _Wanted
) -> HeadGradients:
    """Adds the rows, (N,) bool, that the lists left out."""
    index = dense.nonzero().squeeze(1)
    into = replace(wanted, into_weight=found.weight, into_bias=found.bias)
    exact = _dense(rows.rows(index), plan, into)
    hidden = None if found.hidden is None else found.hidden.index_copy_(0, index, exact.hidden)
    return HeadGradients(hidden, exact.weight, exact.bias)


def _poison(found: HeadGradients, dense: Tensor) -> None:
    """NaN where a list overflowed, for while a graph is captured nobody can be asked."""
    poison = torch.where(dense > 0, torch.nan, 0.0)
    for gradient, missing in ((found.hidden, 1), (found.weight, 0), (found.bias, 0)):
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
