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
    from grpo_fast import linear_cross_entropy, linear_grpo_loss, linear_kl, linear_logprob

    batch = problem.hidden, problem.weight, problem.targets
    options = {"tolerance": tolerance, "recompute": recompute}
    grpo = _grpo_options(problem) if problem.loss == GRPO else {}
    mask = torch.ones_like(problem.targets, dtype=torch.bool)

    def run() -> Outcome:
        if problem.loss == CROSS_ENTROPY:
            return problem.finish_loss(linear_cross_entropy(*batch, **options))
        if problem.loss == GRPO:
            out = linear_grpo_loss(*batch, problem.advantages, **grpo, **options)
            outcome = problem.finish_loss(out.loss, out.logprobs)
        elif problem.loss == KL:
            out = linear_kl(*batch[:2], mask, problem.ref_hidden, problem.ref_weight, tolerance=tolerance)
            outcome = problem.finish_loss(out.divergence.mean(), out.divergence)
        else:
            out = linear_logprob(*batch, **options)
            outcome = problem.finish(out.logprob)
        names = out.certificate.NAMES if problem.backward else ()
        return replace(outcome, certificate={name: getattr(out.certificate, name) for name in names})

    return run


def _grpo_options(problem: Problem) -> dict[str, Any]:
    from grpo_fast import GRPOLossConfig

    sequences = torch.arange(problem.sequences, device=problem.targets.device)
    return {
        "config": GRPOLossConfig(loss_type="dapo", epsilon_low=CLIP, epsilon_high=CLIP, beta=KL_BETA),
        "sequence_ids": sequences.repeat_interleave(problem.targets.numel() // problem.sequences),
        "num_sequences": problem.sequences,
        "old_logprobs": problem.old_logprobs,
        "ref_logprobs": problem.ref_logprobs,
    }


PEERS = (
    Peer("ours", partial(prepare, tolerance=None)),
    Peer("ours, tolerance 0", partial(prepare, tolerance=0.0)),
    Peer("ours, tolerance 0, kept", partial(prepare, tolerance=0.0, recompute=False)),
)
