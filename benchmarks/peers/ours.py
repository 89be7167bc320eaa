"""grpo_fast with the default tolerance, exact, and exact without recomputing logits in the backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..problem import CLIP, CROSS_ENTROPY, GRPO, KL, KL_BETA, Outcome, Problem, Run
from . import Peer, require_cuda


def prepare(problem: Problem, tolerance: float | None, recompute: bool = True) -> Run:
    if not recompute:
        require_cuda(problem)  # elsewhere everything is recomputed
    from grpo_fast import linear_cross_entropy, linear_logprob

    batch = problem.hidden, problem.weight, problem.targets
    options = {"tolerance": tolerance, "recompute": recompute}
    if problem.loss == CROSS_ENTROPY:
        return lambda: problem.finish_loss(linear_cross_entropy(*batch, **options))
    if problem.loss == GRPO:
        return _grpo(problem, options)
    if problem.loss == KL:
        return _kl(problem, tolerance)

    def run() -> Outcome:
        out = linear_logprob(*batch, **options)
        return _with_certificate(problem, problem.finish(out.logprob), out)

    return run


def _grpo(problem: Problem, options: dict[str, Any]) -> Run:
    from grpo_fast import GRPOLossConfig, linear_grpo_loss

    sequences = torch.arange(problem.sequences, device=problem.targets.device)
    options |= {
        "config": GRPOLossConfig(loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP, beta=KL_BETA),
        "sequence_ids": sequences.repeat_interleave(problem.targets.numel() // problem.sequences),
        "num_sequences": problem.sequences,
        "old_logprobs": problem.old_logprobs,
        "ref_logprobs": problem.ref_logprobs,
    }

    def run() -> Outcome:
        out = linear_grpo_loss(problem.hidden, problem.weight, problem.targets, problem.advantages, **options)
        return _with_certificate(problem, problem.finish_loss(out.loss, out.logprobs), out)

    return run


def _kl(problem: Problem, tolerance: float | None) -> Run:
    from grpo_fast import linear_kl

    mask = torch.ones_like(problem.targets, dtype=torch.bool)
    heads = problem.hidden, problem.weight, mask, problem.ref_hidden, problem.ref_weight

    def run() -> Outcome:
        out = linear_kl(*heads, tolerance=tolerance)
        return _with_certificate(problem, problem.finish_loss(out.divergence.mean(), out.divergence), out)

    return run


def _with_certificate(problem: Problem, outcome: Outcome, out: Any) -> Outcome:
    names = out.certificate.NAMES
    found = {name: getattr(out.certificate, name) for name in names} if problem.backward else None
    return replace(outcome, certificate=found)


PEERS = (
    Peer("ours", partial(prepare, tolerance=None)),
    Peer("ours, tolerance 0", partial(prepare, tolerance=0.0)),
    Peer("ours, tolerance 0, kept", partial(prepare, tolerance=0.0, recompute=False)),
)
