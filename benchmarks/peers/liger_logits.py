"""Liger's Triton GRPO loss on full logits. It keeps its log-probabilities, so only its gradients are judged.

It takes logits of one position more than there are targets, and writes their gradient over them. On-policy
the ratio is one, so the loss is another number than the policy gradient's with the same gradient.
"""

from __future__ import annotations

import torch

from ..losses import CLIP, GRPO, KL_BETA, LOGPROB
from ..problem import Outcome, Problem, Run
from .protocol import Peer, require_cuda, require_loss


def prepare(problem: Problem) -> Run:
    require_loss(problem, LOGPROB, GRPO)
    require_cuda(problem)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    shape = (problem.sequences, -1)
    targets = problem.targets.view(shape)
    advantages = problem.advantages.view(shape)[:, 0].contiguous()

    off_policy = problem.loss == GRPO
    old_logprobs = ref_logprobs = None
    if off_policy:
        old_logprobs, ref_logprobs = problem.old_logprobs.view(shape), problem.ref_logprobs.view(shape)
    options = {"beta": KL_BETA if off_policy else 0.0, "eps_low": CLIP, "eps_high": CLIP, "temperature": 1.0}

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        logits = torch.nn.functional.pad(hidden, (0, 0, 0, 1)) @ problem.weight.T
        per_token, *_ = triton_grpo_loss(
            logits, old_logprobs, ref_logprobs, targets, advantages, inplace=True, **options
        )
        outcome = problem.finish_loss(per_token.sum() / targets.numel())
        return outcome if off_policy else Outcome()

    return run


PEERS = (Peer("Liger GRPO on full logits", prepare),)
