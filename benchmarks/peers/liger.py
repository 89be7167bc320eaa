"""Liger: its chunked GRPO and DPO, its cross-entropies, and its Triton GRPO on full logits.

The GRPO losses and DPO keep their log-probabilities, so that only their gradients are judged. On-policy
GRPO's ratio is one: its loss is another number than the policy gradient's with the same gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import CLIP, CROSS_ENTROPY, DPO, DPO_BETA, GRPO, KL_BETA, LOGPROB, Outcome, Problem, Run
from . import Peer, require_cuda, require_loss


def _by_sequence(problem: Problem, tensor: Tensor) -> Tensor:
    """(S, N / S, …)."""
    return tensor.view(problem.sequences, -1, *tensor.shape[1:])


def _policies(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """(S, N / S) log-probabilities of the old policy and of the reference; none on-policy."""
    if problem.old_logprobs is None or problem.ref_logprobs is None:
        return None, None
    return _by_sequence(problem, problem.old_logprobs), _by_sequence(problem, problem.ref_logprobs)


def prepare_grpo(problem: Problem) -> Run:
    """Forms its gradients in the forward, even where none is asked for."""
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
    targets = _by_sequence(problem, problem.targets)
    mask = torch.ones(targets.shape, device=targets.device)
    advantages = _by_sequence(problem, problem.advantages)[:, 0].contiguous()
    old_logprobs, ref_logprobs = _policies(problem)
    policies = {"ref_per_token_logps": ref_logprobs, "old_per_token_logps": old_logprobs}

    def run() -> Outcome:
        hidden = _by_sequence(problem, problem.hidden)
        value, _ = loss(hidden, problem.weight, targets, mask, advantages, **policies)
        outcome = problem.finish_loss(value)
        return outcome if off_policy else Outcome()

    return run


def prepare_dpo(problem: Problem) -> Run:
    require_loss(problem, DPO)
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=DPO_BETA, use_ref_model=False, compiled=problem.hidden.is_cuda)
    targets = _by_sequence(problem, problem.targets)

    def run() -> Outcome:
        value, _ = loss(problem.weight, _by_sequence(problem, problem.hidden), targets)
        return problem.finish_loss(value)

    return run


def prepare_cross_entropy(problem: Problem) -> Run:
    """Forms its gradients in the forward, chunk by chunk."""
    require_loss(problem, CROSS_ENTROPY)
    require_cuda(problem)
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda: problem.finish_loss(loss(problem.weight, problem.hidden, problem.targets))


def prepare_per_token(problem: Problem) -> Run:
    """By its SM90 kernels on Hopper, in chunked torch elsewhere."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    function = LigerFusedLinearScaledCrossEntropyFunction.apply
    return lambda: problem.finish(-function(problem.hidden, problem.weight, problem.targets))


def prepare_grpo_on_logits(problem: Problem) -> Run:
    """Takes logits of one position more than there are targets, and writes their gradient over them."""
    require_loss(problem, LOGPROB, GRPO)
    require_cuda(problem)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    off_policy = problem.loss == GRPO
    targets = _by_sequence(problem, problem.targets)
    advantages = _by_sequence(problem, problem.advantages)[:, 0].contiguous()
    old_logprobs, ref_logprobs = _policies(problem)
    options = {"beta": KL_BETA if off_policy else 0.0, "eps_low": CLIP, "eps_high": CLIP, "temperature": 1.0}

    def run() -> Outcome:
        hidden = _by_sequence(problem, problem.hidden)
        logits = torch.nn.functional.pad(hidden, (0, 0, 0, 1)) @ problem.weight.T
        per_token, *_ = triton_grpo_loss(
            logits, old_logprobs, ref_logprobs, targets, advantages, inplace=True, **options
        )
        outcome = problem.finish_loss(per_token.sum() / targets.numel())
        return outcome if off_policy else Outcome()

    return run


PEERS = (
    Peer("Liger chunked GRPO", prepare_grpo),
    Peer("Liger chunked DPO", prepare_dpo),
    Peer("Liger fused linear cross-entropy", prepare_cross_entropy),
    Peer("Liger per-token", prepare_per_token),
    Peer("Liger GRPO on full logits", prepare_grpo_on_logits),
)
