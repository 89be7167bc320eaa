"""grpo_fast: with the default tolerance, exact, and the plain torch reference.

GRPO and cross-entropy by their fused functions, the others from log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..losses import CLIP, CROSS_ENTROPY, GRPO, KL_BETA
from ..problem import Outcome, Problem, Run
from .protocol import Peer, Unsupported, require_cuda

if TYPE_CHECKING:
    from grpo_fast.head.outputs import Certificate

_REFERENCE_FLOPS = 12e12  # of one product on a GPU


def prepare(problem: Problem, tolerance: float | None, recompute: bool = True) -> Run:
    if not recompute:
        require_cuda(problem)  # elsewhere everything is recomputed
    prepare_loss = {GRPO: _grpo, CROSS_ENTROPY: _cross_entropy}.get(problem.loss, _from_logprobs)
    return prepare_loss(problem, {"tolerance": tolerance, "recompute": recompute})


def _from_logprobs(problem: Problem, options: dict[str, Any]) -> Run:
    from grpo_fast import linear_logprob

    def run() -> Outcome:
        out = linear_logprob(problem.hidden, problem.weight, problem.targets, **options)
        return _certified(problem.finish(out.logprob), problem, out.certificate)

    return run


def _grpo(problem: Problem, options: dict[str, Any]) -> Run:
    from grpo_fast import GRPOLossConfig, linear_grpo_loss

    config = GRPOLossConfig(loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP, beta=KL_BETA)
    length = problem.targets.numel() // problem.sequences
    sequences = torch.arange(problem.sequences, device=problem.targets.device)
    inputs = {
        "sequence_ids": sequences.repeat_interleave(length),
        "num_sequences": problem.sequences,
        "old_logprobs": problem.old_logprobs,
        "ref_logprobs": problem.ref_logprobs,
    }

    def run() -> Outcome:
        out = linear_grpo_loss(
            problem.hidden,
            problem.weight,
            problem.targets,
            problem.advantages,
            config=config,
            **inputs,
            **options,
        )
        return _certified(problem.finish_loss(out.loss, out.logprobs), problem, out.certificate)

    return run


def _cross_entropy(problem: Problem, options: dict[str, Any]) -> Run:
    from grpo_fast import linear_cross_entropy

    return lambda: problem.finish_loss(
        linear_cross_entropy(problem.hidden, problem.weight, problem.targets, **options)
    )


def _certified(outcome: Outcome, problem: Problem, certificate: Certificate) -> Outcome:
    """With what the backward left out."""
    names = ("density", "left_out_mean", "left_out_max", "error_bound")
    found = {name: getattr(certificate, name) for name in names} if problem.backward else None
    return replace(outcome, certificate=found)


def prepare_reference(problem: Problem) -> Run:
    rows, (vocabulary, depth) = problem.targets.numel(), problem.weight.shape
    if problem.hidden.is_cuda and 2 * rows * vocabulary * depth > _REFERENCE_FLOPS:
        raise Unsupported("multiplies in float32: at this size it would take the others' time")
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
