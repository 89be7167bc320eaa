"""The head over a weight that is split by vocabulary: each rank holds contiguous rows, in rank order.

Every rank sees every token and runs the head on its own rows; what crosses ranks is a few numbers per token.
With lse_r a rank's log-sum-exp and w_r = exp(lse_r - lse) its share of the probability, all statistics
follow:

    log p = log p_r + lse_r - lse        (from the rank that holds the target)
    entropy = Σ_r w_r (entropy_r + lse - lse_r)
    log Σ p² = log Σ_r w_r² Σ p_r²

The results are the same on every rank, and each rank differentiates its own copy of the loss; only the
gradient of the hidden states is summed over ranks.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.head.operator import head_statistics
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import DEFAULT_TOLERANCE
from grpo_fast.head.problem import ROW_IGNORED, HeadProblem, Request, RowStatistics

_LARGE = 500.0
"""Finite stand-in for infinity where it is multiplied by a share of zero."""


@functools.cache
def shard_bounds(entries: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Where this rank's rows begin, and the whole vocabulary. Collective on its first call per size."""
    sizes: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, entries, group=group)
    return sum(sizes[: dist.get_rank(group)]), sum(sizes)


def parallel_statistics(
    problem: HeadProblem,
    request: Request,
    group: dist.ProcessGroup,
    *,
    differentiable: frozenset[str],
    tolerance: float | None,
) -> tuple[RowStatistics, Certificate]:
    """`head_statistics` of the whole vocabulary.

    `problem.weight` and `.bias` are this rank's rows, its targets are global.
    """
    start, total = shard_bounds(problem.vocabulary, group)
    budget = DEFAULT_TOLERANCE if tolerance is None else tolerance
    local, certificate = head_statistics(
        replace(
            problem,
            hidden=_SumOfGradients.apply(problem.hidden, group),
            targets=_local_targets(problem.targets, start, problem.vocabulary),
        ),
        request,
        differentiable=differentiable | {"logsumexp"},
        tolerance=budget / dist.get_world_size(group),
    )
    here = (problem.targets >= start) & (problem.targets < start + problem.vocabulary)
    logsumexp = _LogSumExp.apply(local.logsumexp, group)
    empty = local.logsumexp.isneginf()
    behind = torch.where(empty, torch.inf, logsumexp - local.logsumexp)
    share = (-behind).exp()

    def spread(value: Tensor) -> Tensor:
        return torch.where(empty, 0, value)

    statistics = RowStatistics(
        logprob=_Sum.apply(torch.where(here, local.logprob - behind, 0), group),
        logsumexp=logsumexp,
        entropy=_Sum.apply(share * (spread(local.entropy) + behind.clamp_max(_LARGE)), group)
        if request.entropy
        else local.entropy,
        mean_logit=_Sum.apply(local.mean_logit * (problem.vocabulary / total), group)
        if request.mean_logit
        else local.mean_logit,
        max_logit=_all_reduce(local.max_logit, dist.ReduceOp.MAX, group)
        if request.max_logit
        else local.max_logit,
        target_logit=_all_reduce(local.target_logit, dist.ReduceOp.SUM, group)
        if request.max_logit
        else local.target_logit,
        log_sum_sq=_log_sum_exp(spread(local.log_sum_sq) - 2 * behind, group)
        if request.log_sum_sq
        else local.log_sum_sq,
    )
    return statistics, certificate


def _local_targets(targets: Tensor, start: int, entries: int) -> Tensor:
    """Targets within this rank's rows; `entries` where another rank has it, marks below zero unchanged."""
    shifted = targets - start
    elsewhere = (targets > ROW_IGNORED) & ((shifted < 0) | (shifted >= entries))
    return torch.where(targets < 0, targets, torch.where(elsewhere, entries, shifted))


def _all_reduce(tensor: Tensor, operation: dist.ReduceOp, group: dist.ProcessGroup) -> Tensor:
    result = tensor.detach().clone()
    dist.all_reduce(result, operation, group=group)
    return result


def _log_sum_exp(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    maximum = _all_reduce(values, dist.ReduceOp.MAX, group)
    base = torch.where(maximum.isneginf(), torch.zeros_like(maximum), maximum)
    return base + _all_reduce((values - base).exp(), dist.ReduceOp.SUM, group).log()


class _SumOfGradients(torch.autograd.Function):
    """Identity forward; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, dist.ReduceOp.SUM, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the group; every rank's loss is a copy, so the gradient passes as it is."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(tensor, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LogSumExp(torch.autograd.Function):
    """log Σ_r exp(value_r); the gradient of value_r is its share of the sum."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        result = _log_sum_exp(values, group)
        ctx.save_for_backward(values, result)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        values, result = ctx.saved_tensors
        return gradient * (values - result).exp(), None
