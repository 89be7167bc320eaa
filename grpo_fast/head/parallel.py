"""The head over a weight that is split by vocabulary: each rank holds contiguous rows, in rank order.

Every rank sees every token and runs the head on its own rows; only a few numbers per token cross ranks. With
lse_r a rank's log-sum-exp and w_r = exp(lse_r - lse) its share of the probability, all statistics follow:

    log p = log p_r + lse_r - lse        (from the rank that holds the target)
    entropy = Σ_r w_r (entropy_r + lse - lse_r)
    log Σ p² = log Σ_r w_r² Σ p_r²

The results are the same on every rank, and each rank differentiates its own copy of the loss; only the
gradient of the hidden states is summed over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from grpo_fast.head.call import ROW_IGNORED, HeadCall, KLCall, RowStatistics, Shard
from grpo_fast.head.divergence import divergence_terms, weighable_
from grpo_fast.head.operator import head_statistics, row_divergence
from grpo_fast.head.outputs import Certificate


def parallel_statistics(call: HeadCall, shard: Shard) -> tuple[RowStatistics, Certificate]:
    """Compute `head_statistics` of the whole vocabulary from this rank's rows of the weight.

    `call.weight` and `.bias` are this rank's rows, its targets are global. Each rank samples its own tiles in
    units of the rounding error of its rows, so that the ranks together keep to the tolerance.
    """
    entries, targets, group, start = call.vocabulary, call.targets, shard.group, shard.start
    local, certificate = head_statistics(
        call._replace(
            hidden=_SumOfGradients.apply(call.hidden, group),
            targets=_local_targets(targets, start, entries),
            jacobian=False,  # the log-sum-exp is differentiated too
        )
    )
    here = (targets >= start) & (targets < start + entries)
    logsumexp = _logsumexp(local.logsumexp, group)
    behind = logsumexp - local.logsumexp.detach()
    behind = torch.where(local.logsumexp.isneginf(), torch.inf, behind)
    share = (-behind).exp()
    logprob, of_logsumexp = _logprob(local.logprob.detach(), local.logsumexp.detach(), behind, here, group)
    whole = {
        "logprob": _with_gradient(logprob, (local.logprob, here), (local.logsumexp, of_logsumexp)),
        "logsumexp": _with_gradient(logsumexp, (local.logsumexp, share)),
    }
    if call.entropy:
        own = torch.where(share > 0, local.entropy.detach() + behind, 0)
        entropy = _sum(share * own, group)
        slopes = (local.entropy, share), (local.logsumexp, share * (own - entropy))
        whole["entropy"] = _with_gradient(entropy, *slopes)
    if call.mean_logit:
        weight = (entries / shard.vocabulary).expand_as(local.mean_logit)
        total = _sum(local.mean_logit.detach() * weight, group)
        whole["mean_logit"] = _with_gradient(total, (local.mean_logit, weight))
    if call.max_logit:
        whole["max_logit"] = _all_reduce(local.max_logit, ReduceOp.MAX, group)
        whole["target_logit"] = _sum(local.target_logit, group)
    if call.log_sum_sq:
        squares = torch.where(behind.isinf(), 0, local.log_sum_sq) - 2 * behind
        whole["log_sum_sq"] = _logsumexp(squares, group)
    worked = targets >= 0
    return local._replace(**{k: torch.where(worked, v, 0) for k, v in whole.items()}), certificate


def parallel_divergence(call: KLCall, shard: Shard) -> tuple[Tensor, Certificate]:
    """Compute (N,) divergences over the whole vocabulary from this rank's rows of both weights.

    With P_r and Q_r the shares of a rank, KL = Σ_r P_r KL_r + KL(P || Q). The mixture of "jsd" depends on the
    shares: it takes two more logit products, and twice those of the backward.
    """
    group, mask = shard.group, call.mask
    hidden = _SumOfGradients.apply(call.student.hidden, group)
    call = call._replace(student=call.student._replace(hidden=hidden))
    if call.direction == "jsd":
        with torch.no_grad():
            local, _ = row_divergence(call._replace(direction="forward"))
        wholes = [_logsumexp(each, group) for each in (local.logsumexp, local.ref_logsumexp)]
        local, certificate = row_divergence(call._replace(logsumexp=wholes[0], ref_logsumexp=wholes[1]))
        center = _sum(local.center, group)
        slopes = torch.ones_like(center), (call.beta - 1) * center
        total = _sum(local.divergence, group)
    else:
        local, certificate = row_divergence(call)
        log_p, log_q = (
            each.detach() - _logsumexp(each, group) for each in (local.logsumexp, local.ref_logsumexp)
        )
        p, q = log_p.exp(), log_q.exp()
        d = weighable_(log_p - log_q, call.direction, p, q)
        within = torch.where((p if call.direction == "reverse" else q) == 0, 0, local.divergence.detach())
        if call.direction == "reverse":
            total = _sum(p * within + divergence_terms(p, q, d), group)
            slopes = p, p * (within + d - total)
        else:
            total = _sum(q * within + divergence_terms(q, p, -d), group)
            slopes = q, p - q
    inputs = zip((local.divergence, local.logsumexp), slopes, strict=True)
    return _with_gradient(torch.where(mask, total, 0), *inputs), certificate


class _Known(torch.autograd.Function):
    """A result that is computed already, differentiable in some inputs by known slopes."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs_and_slopes: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_and_slopes[len(inputs_and_slopes) // 2 :])
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # A slope of zero stays zero where the gradient is not finite.
        slopes = ctx.saved_tensors
        of_inputs = (torch.where(slope == 0, 0, gradient * slope) for slope in slopes)
        return (None, *of_inputs, *(None for _ in slopes))


def _with_gradient(result: Tensor, *inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Let (N,) gradients of `result` flow to each input times its slope; each rank's loss is a copy."""
    tensors, slopes = zip(*inputs, strict=True)
    return _Known.apply(result, *tensors, *slopes)


def _logprob(
    logprob: Tensor, logsumexp: Tensor, behind: Tensor, here: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Compute log p, and its slope in this rank's log-sum-exp: 1 - w_r with the target, else -w_r.

    For a likely target both come from the other entries' sum relative to it, Σ_{v≠t} exp(z_v - z_t): a
    difference of log-sum-exps would lose their digits.
    """
    direct, z = _sum(torch.where(here, torch.stack([logprob - behind, logprob + logsumexp]), 0), group)
    same_rank = torch.where(here, torch.expm1(-logprob), 0)
    elsewhere = torch.where(here, 0, (logsumexp - z).exp())
    same_rank, elsewhere = _sum(torch.stack([same_rank, elsewhere]), group)
    likely = direct > -1
    whole = torch.where(likely, -torch.log1p(same_rank + elsewhere), direct)
    others = torch.where(likely, elsewhere * whole.exp(), -torch.expm1(-behind))
    return whole, torch.where(here, others, -(-behind).exp())


def _local_targets(targets: Tensor, start: Tensor, entries: int) -> Tensor:
    """Shift targets to this rank's rows; `entries` for another rank's, marks below zero unchanged."""
    shifted = targets - start
    elsewhere = (targets > ROW_IGNORED) & ((shifted < 0) | (shifted >= entries))
    return torch.where(targets < 0, targets, torch.where(elsewhere, entries, shifted))


def _all_reduce(tensor: Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    # Ranks add up memory: whatever the strides, it must be in the same order on all of them.
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=group)
    return result


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _all_reduce(tensor, ReduceOp.SUM, group)


def _logsumexp(values: Tensor, group: ProcessGroup) -> Tensor:
    """Compute log Σ_r exp(values_r) over the ranks, without a graph."""
    maximum = _all_reduce(values, ReduceOp.MAX, group)
    base = torch.where(maximum.isneginf(), 0, maximum)
    return base + _sum((values - base).exp(), group).log()


class _SumOfGradients(torch.autograd.Function):
    """Identity forward; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ReduceOp.SUM, ctx.group), None
