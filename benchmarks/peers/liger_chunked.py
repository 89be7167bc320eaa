"""Liger's chunked GRPO loss. It keeps its log-probabilities, so only its gradients are judged.

On-policy the ratio is one, so the loss is another number than ours with the same gradient. It forms its
gradients in the forward: its forward alone costs as much.
"""

from __future__ import annotations

import torch

from ..problem import Outcome, Problem, Run
from .protocol import Peer


def prepare(problem: Problem) -> Run:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", compiled=problem.hidden.is_cuda
    )
    shape = (problem.sequences, -1)
    mask = torch.ones(problem.targets.shape, device=problem.targets.device).view(shape)
    advantages = problem.advantages.view(shape)[:, 0].contiguous()

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        value, _ = loss(hidden, problem.weight, problem.targets.view(shape), mask, advantages)
        if problem.backward:
            value.backward()
        return Outcome()

    return run


PEERS = (Peer("Liger chunked GRPO", prepare),)
