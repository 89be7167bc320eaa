"""Liger's chunked losses: GRPO and DPO. They keep their log-probabilities, so these are not judged.

On-policy GRPO's ratio is one, so its loss is another number than the policy gradient's with the same
gradient. Both form their gradients in the forward, GRPO even where none is asked for.
"""

from __future__ import annotations

import torch

from ..losses import CLIP, DPO, DPO_BETA, GRPO, KL_BETA, LOGPROB
from ..problem import Outcome, Problem, Run
from .protocol import Peer, require_loss


def prepare_grpo(problem: Problem) -> Run:
    require_loss(problem, LOGPROB, GRPO)
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    off_policy = problem.loss == GRPO
    loss = LigerFusedLinearGRPOLoss(
        beta=KL_BETA if off_policy else 0.0,
        use_ref_model=off_policy,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        loss_type="bnpo",
        compiled=problem.hidden.is_cuda,
    )
    shape = (problem.sequences, -1)
    mask = torch.ones(problem.targets.shape, device=problem.targets.device).view(shape)
    advantages = problem.advantages.view(shape)[:, 0].contiguous()
    policies = {}
    if off_policy:
        policies = {
            "ref_per_token_logps": problem.ref_logprobs.view(shape),
            "old_per_token_logps": problem.old_logprobs.view(shape),
        }

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        value, _ = loss(hidden, problem.weight, problem.targets.view(shape), mask, advantages, **policies)
        outcome = problem.finish_loss(value)
        return outcome if off_policy else Outcome()

    return run


def prepare_dpo(problem: Problem) -> Run:
    require_loss(problem, DPO)
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=DPO_BETA, use_ref_model=False, compiled=problem.hidden.is_cuda)
    shape = (problem.sequences, -1)

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        value, _ = loss(problem.weight, hidden, problem.targets.view(shape))
        return problem.finish_loss(value)

    return run


PEERS = (Peer("Liger chunked GRPO", prepare_grpo), Peer("Liger chunked DPO", prepare_dpo))
