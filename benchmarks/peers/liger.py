"""Liger: chunked GRPO, DPO and JSD, cross-entropies, and Triton GRPO on full logits.

GRPO and DPO return no log-probabilities. On-policy GRPO's loss is another number with the same gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import CLIP, DPO, DPO_BETA, GRPO, KL, KL_BETA, LOGPROB, Outcome, Problem, Run
from . import Function, Peer, of_cross_entropy, of_logprobs, require_cuda, require_loss


def _by_sequence(problem: Problem, tensor: Tensor | None) -> Tensor | None:
    """(S, N / S, …)."""
    return None if tensor is None else tensor.view(problem.sequences, -1, *tensor.shape[1:])


def _advantages(problem: Problem) -> Tensor:
    """(S,)."""
    return _by_sequence(problem, problem.advantages)[:, 0].contiguous()


def prepare_grpo(problem: Problem) -> Run:
    """Prepare the chunked GRPO, which always computes its gradients in the forward."""
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
    targets, advantages = _by_sequence(problem, problem.targets), _advantages(problem)
    mask = torch.ones(targets.shape, device=targets.device)
    policies = {
        "ref_per_token_logps": _by_sequence(problem, problem.ref_logprobs),
        "old_per_token_logps": _by_sequence(problem, problem.old_logprobs),
    }

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
    return lambda: problem.finish_loss(
        loss(problem.weight, _by_sequence(problem, problem.hidden), targets)[0]
    )


def prepare_jsd(problem: Problem) -> Run:
    """Prepare the chunked distillation loss, whose JSD is the reverse KL at beta 1."""
    require_loss(problem, KL)
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(0.0, 1.0, beta=1.0, compiled=problem.hidden.is_cuda)  # of hard and soft
    reference = problem.ref_hidden, problem.ref_weight, problem.targets
    return lambda: problem.finish_loss(loss(problem.hidden, problem.weight, *reference))


def load_cross_entropy(reduction: str) -> Function:
    """Load the chunked cross-entropy, which computes its gradients in the forward."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction=reduction)
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


def load_per_token() -> Function:
    """Load the function that runs SM90 kernels on Hopper, and chunked torch elsewhere."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    return lambda *operands: -LigerFusedLinearScaledCrossEntropyFunction.apply(*operands)


def prepare_grpo_on_logits(problem: Problem) -> Run:
    """Prepare the Triton loss, which overwrites its logits, of one position more than the targets."""
    require_loss(problem, LOGPROB, GRPO)
    require_cuda(problem)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    off_policy = problem.loss == GRPO
    old, reference = (_by_sequence(problem, of) for of in (problem.old_logprobs, problem.ref_logprobs))
    batch = old, reference, _by_sequence(problem, problem.targets), _advantages(problem)
    options = {"beta": KL_BETA if off_policy else 0.0, "eps_low": CLIP, "eps_high": CLIP, "temperature": 1.0}

    def run() -> Outcome:
        hidden = _by_sequence(problem, problem.hidden)
        logits = torch.nn.functional.pad(hidden, (0, 0, 0, 1)) @ problem.weight.T
        per_token, *_ = triton_grpo_loss(logits, *batch, inplace=True, **options)
        outcome = problem.finish_loss(per_token.sum() / problem.targets.numel())
        return outcome if off_policy else Outcome()

    return run


PEERS = (
    Peer("Liger chunked GRPO", prepare_grpo),
    Peer("Liger chunked DPO", prepare_dpo),
    Peer("Liger chunked JSD", prepare_jsd),
    of_cross_entropy("Liger fused linear cross-entropy", load_cross_entropy, cuda=True, alone=True),
    of_logprobs("Liger per-token", load_per_token),
    Peer("Liger GRPO on full logits", prepare_grpo_on_logits),
)
