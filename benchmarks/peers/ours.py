"""grpo_fast: with the default tolerance, exact, and the plain torch reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem import Outcome, Problem, Run
from .protocol import Peer, require_cuda


def prepare(problem: Problem, tolerance: float | None, recompute: bool = True) -> Run:
    from grpo_fast import linear_logprob

    if not recompute:
        require_cuda(problem)  # elsewhere everything is recomputed

    def run() -> Outcome:
        out = linear_logprob(
            problem.hidden, problem.weight, problem.targets, tolerance=tolerance, recompute=recompute
        )
        outcome = problem.finish(out.logprob)
        if not problem.backward:
            return outcome
        found = out.certificate
        names = ("density", "left_out_mean", "left_out_max", "error_bound")
        return Outcome(outcome.logprobs, {name: getattr(found, name) for name in names})

    return run


def prepare_reference(problem: Problem) -> Run:
    return lambda: problem.finish(_Reference.apply(problem.hidden, problem.weight, problem.targets))


class _Reference(torch.autograd.Function):
    """The path that runs where no kernel does, on any device."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        from grpo_fast.head import reference
        from grpo_fast.head.plan import Device, Workload, plan_head
        from grpo_fast.head.problem import HeadProblem, Request

        problem = HeadProblem(hidden, weight, targets)
        work = Workload(hidden.shape[0], weight.shape[0], hidden.dtype)
        chunks = plan_head(Device(hidden.device.type), work).chunks
        frozen = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        statistics, jacobian = reference.forward(problem, Request(), chunks, jacobian=frozen)
        ctx.saved = problem, statistics, jacobian, chunks
        return statistics.logprob

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        from grpo_fast.head import reference
        from grpo_fast.head.problem import RowGradients

        problem, statistics, jacobian, chunks = ctx.saved
        need_hidden, need_weight, _ = ctx.needs_input_grad
        gradients = reference.backward(
            problem,
            statistics,
            RowGradients(upstream, None, None, None),
            chunks,
            jacobian=jacobian,
            need_hidden=need_hidden,
            need_weight=need_weight,
            need_bias=False,
        )
        return gradients.hidden, gradients.weight, None


PEERS = (
    Peer("ours", partial(prepare, tolerance=None)),
    Peer("ours, tolerance 0", partial(prepare, tolerance=0.0)),
    Peer("ours, tolerance 0, kept", partial(prepare, tolerance=0.0, recompute=False)),
    Peer("ours, reference", prepare_reference),
)
