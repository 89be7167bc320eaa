"""Liger's Triton GRPO loss on full logits. It keeps its log-probabilities, so only its gradients are judged.

It takes logits of one position more than there are targets, and writes their gradient over them. On-policy
the ratio is one, so the loss is another number than ours with the same gradient.
"""

from __future__ import annotations

import torch

from ..problem import Outcome, Problem, Run
from .protocol import Peer, require_cuda


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    shape = (problem.sequences, -1)
    targets = problem.targets.view(shape)
    advantages = problem.advantages.view(shape)[:, 0].contiguous()

    def run() -> Outcome:
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        logits = torch.nn.functional.pad(hidden, (0, 0, 0, 1)) @ problem.weight.T
        old_logprobs = ref_logprobs = None
        per_token, *_ = triton_grpo_loss(
            logits, old_logprobs, ref_logprobs, targets, advantages, temperature=1.0, beta=0.0, inplace=True
        )
        if problem.backward:
            (per_token.sum() / targets.numel()).backward()
        return Outcome()

    return run


PEERS = (Peer("Liger GRPO on full logits", prepare),)
