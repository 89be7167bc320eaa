"""Liger's fused linear cross-entropy. It forms its gradients in the forward, chunk by chunk."""

from __future__ import annotations

from ..losses import CROSS_ENTROPY
from ..problem import Problem, Run
from .protocol import Peer, require_cuda, require_loss


def prepare(problem: Problem) -> Run:
    require_loss(problem, CROSS_ENTROPY)
    require_cuda(problem)
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda: problem.finish_loss(loss(problem.weight, problem.hidden, problem.targets))


PEERS = (Peer("Liger fused linear cross-entropy", prepare),)
