"""grpo_fast: with the default tolerance, exact, and in plain torch.

GRPO and cross-entropy by their fused functions, the others from log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ..problem import CLIP, CROSS_ENTROPY, GRPO, KL_BETA, Outcome, Problem, Run
from . import Peer, Unsupported, require_cuda

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

    sequences = torch.arange(problem.sequences, device=problem.targets.device)
    length = problem.targets.numel() // problem.sequences
    options |= {
        "config": GRPOLossConfig(loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP, beta=KL_BETA),
        "sequence_ids": sequences.repeat_interleave(length),
        "num_sequences": problem.sequences,
        "old_logprobs": problem.old_logprobs,
        "ref_logprobs": problem.ref_logprobs,
    }

    def run() -> Outcome:
        batch = problem.hidden, problem.weight, problem.targets, problem.advantages
        out = linear_grpo_loss(*batch, **options)
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
    """The path in plain torch: what runs where no kernel does, on any device."""
    rows, (vocabulary, depth) = problem.targets.numel(), problem.weight.shape
    if problem.hidden.is_cuda and 2 * rows * vocabulary * depth > _REFERENCE_FLOPS:
        raise Unsupported("multiplies in float32: at this size it would take the others' time")
    from grpo_fast.head import operator
    from grpo_fast.head.plan import Device

    exact = prepare(problem, tolerance=0.0)

    def run() -> Outcome:
        with mock.patch.object(operator, "device_facts", lambda kind, index: Device(kind)):  # without Triton
            return replace(exact(), certificate=None)

    return run


PEERS = (
    Peer("ours", partial(prepare, tolerance=None)),
    Peer("ours, tolerance 0", partial(prepare, tolerance=0.0)),
    Peer("ours, tolerance 0, kept", partial(prepare, tolerance=0.0, recompute=False)),
    Peer("ours, reference", prepare_reference),
)
