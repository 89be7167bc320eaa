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

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from grpo_fast.head.call import ROW_IGNORED, HeadCall, KLCall, RowStatistics, Shard
from grpo_fast.head.divergence import divergence_terms, weighable_
from grpo_fast.head.divergence_operator import row_divergence
from grpo_fast.head.operator import head_statistics
from grpo_fast.head.outputs import Certificate


def parallel_statistics(call: HeadCall, shard: Shard) -> tuple[RowStatistics, Certificate]:
    """`head_statistics` of the whole vocabulary, of which the weight is one of several parts.

    `call.weight` and `.bias` are this rank's rows, its targets are global. Each rank samples by
    itself, in units of what rounding costs among its rows, so that all together keep to the tolerance.
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
    base = _finite_maximum(local.logsumexp, group)
    logsumexp = base + _Sum.apply((local.logsumexp - base).exp(), group).log()
    behind = (logsumexp - local.logsumexp).detach()
    behind = torch.where(local.logsumexp.isneginf(), torch.inf, behind)
    whole = {
        "logprob": _LogProb.apply(local.logprob, local.logsumexp, behind, here, group),
        "logsumexp": logsumexp,
    }
    if call.entropy:
        whole["entropy"] = _Entropy.apply(local.entropy, local.logsumexp, behind, group)
    if call.mean_logit:
        whole["mean_logit"] = _Sum.apply(local.mean_logit * (entries / shard.vocabulary), group)
    if call.max_logit:
        whole["max_logit"] = _all_reduce(local.max_logit, ReduceOp.MAX, group)
        whole["target_logit"] = _all_reduce(local.target_logit, ReduceOp.SUM, group)
    if call.log_sum_sq:
        squares = torch.where(behind.isinf(), 0, local.log_sum_sq) - 2 * behind
        base = _finite_maximum(squares, group)
        whole["log_sum_sq"] = base + _all_reduce((squares - base).exp(), ReduceOp.SUM, group).log()
    worked = targets >= 0
    return local._replace(**{k: torch.where(worked, v, 0) for k, v in whole.items()}), certificate


def parallel_divergence(call: KLCall, shard: Shard) -> tuple[Tensor, Certificate]:
    """(N,) divergence over the whole vocabulary, of which both weights are the same one of several parts.

    With P_r and Q_r the shares of a rank, KL = Σ_r P_r KL_r + KL(P || Q). The mixture of "jsd" depends on the
    shares: it takes two more logit products, and twice those of the backward.
    """
    group, mask = shard.group, call.mask
    call = call._replace(hidden=_SumOfGradients.apply(call.hidden, group))
    if call.direction == "jsd":
        with torch.no_grad():
            local, _ = row_divergence(call._replace(direction="forward"))
        wholes = [_whole_logsumexp(each, group) for each in (local.logsumexp, local.ref_logsumexp)]
        local, certificate = row_divergence(call._replace(logsumexp=wholes[0], ref_logsumexp=wholes[1]))
        center = _all_reduce(local.center, ReduceOp.SUM, group)
        factors = torch.ones_like(center), (call.beta - 1) * center
        total = _all_reduce(local.divergence, ReduceOp.SUM, group)
    else:
        local, certificate = row_divergence(call)
        log_p, log_q = (
            each.detach() - _whole_logsumexp(each, group) for each in (local.logsumexp, local.ref_logsumexp)
        )
        p, q = log_p.exp(), log_q.exp()
        d = weighable_(log_p - log_q, call.direction, p, q)
        within = torch.where((p if call.direction == "reverse" else q) == 0, 0, local.divergence.detach())
        if call.direction == "reverse":
            total = _all_reduce(p * within + divergence_terms(p, q, d), ReduceOp.SUM, group)
            factors = p, p * (within + d - total)
        else:
            total = _all_reduce(q * within + divergence_terms(q, p, -d), ReduceOp.SUM, group)
            factors = q, p - q
    result = _OfShards.apply(local.divergence, local.logsumexp, torch.where(mask, total, 0), *factors)
    return result, certificate


def _whole_logsumexp(local: Tensor, group: ProcessGroup) -> Tensor:
    base = _finite_maximum(local, group)
    return base + _all_reduce((local - base).exp(), ReduceOp.SUM, group).log()


class _OfShards(torch.autograd.Function):
    """A result that is known, with its gradient in what this rank found. Every rank's loss is a copy."""

    @staticmethod
    def forward(ctx: Any, divergence: Tensor, logsumexp: Tensor, total: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_divergence, of_logsumexp = ctx.saved_tensors
        return gradient * of_divergence, gradient * of_logsumexp, None, None, None


def _local_targets(targets: Tensor, start: Tensor, entries: int) -> Tensor:
    """Targets within this rank's rows; `entries` where another rank has it, marks below zero unchanged."""
    shifted = targets - start
    elsewhere = (targets > ROW_IGNORED) & ((shifted < 0) | (shifted >= entries))
    return torch.where(targets < 0, targets, torch.where(elsewhere, entries, shifted))


def _all_reduce(tensor: Tensor, operation: ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    # Ranks add up memory: whatever the strides, it must be in the same order on all of them.
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=group)
    return result


def _finite_maximum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Over the group, zero where it is -inf: what may be subtracted before an exponential."""
    maximum = _all_reduce(values, ReduceOp.MAX, group)
    return torch.where(maximum.isneginf(), 0, maximum)


class _SumOfGradients(torch.autograd.Function):
    """Identity forward; the gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ReduceOp.SUM, ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over the group. Every rank's loss is a copy, here and below: the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(tensor, ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LogProb(torch.autograd.Function):
    """log p from the rank that holds the target; its lse_r gets 1 - w_r of the gradient, the others' -w_r.

    Of a likely target both are formed from what the others hold relative to it, Σ_{v≠t} exp(z_v - z_t): a
    difference of log-sum-exps would lose their digits.
    """

    @staticmethod
    def forward(
        ctx: Any, logprob: Tensor, logsumexp: Tensor, behind: Tensor, here: Tensor, group: ProcessGroup
    ) -> Tensor:
        of_target = torch.stack([logprob - behind, logprob + logsumexp])
        direct, z = _all_reduce(torch.where(here, of_target, 0), ReduceOp.SUM, group)
        beside = torch.where(here, torch.expm1(-logprob), 0)
        elsewhere = torch.where(here, 0, (logsumexp - z).exp())
        beside, elsewhere = _all_reduce(torch.stack([beside, elsewhere]), ReduceOp.SUM, group)
        likely = direct > -1
        whole = torch.where(likely, -torch.log1p(beside + elsewhere), direct)
        others = torch.where(likely, elsewhere * whole.exp(), -torch.expm1(-behind))
        ctx.save_for_backward(torch.where(here, others, -(-behind).exp()), here)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_logsumexp, here = ctx.saved_tensors
        return torch.where(here, gradient, 0), gradient * of_logsumexp, None, None, None


class _Entropy(torch.autograd.Function):
    """Σ_r w_r a_r, a_r = entropy_r + lse - lse_r; the gradient of lse_r is w_r (a_r - entropy)."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, logsumexp: Tensor, behind: Tensor, group: ProcessGroup) -> Tensor:
        share = (-behind).exp()
        own = torch.where(share > 0, entropy + behind, 0)
        result = _all_reduce(share * own, ReduceOp.SUM, group)
        ctx.save_for_backward(share, own, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share, own, result = ctx.saved_tensors
        return gradient * share, gradient * share * (own - result), None, None
