"""Liger's per-token scaled cross-entropy: its SM90 kernels on Hopper, chunked torch elsewhere."""

from __future__ import annotations

from ..problem import Problem, Run
from .protocol import Peer


def prepare(problem: Problem) -> Run:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def run():
        losses = LigerFusedLinearScaledCrossEntropyFunction.apply(
            problem.hidden, problem.weight, problem.targets
        )
        return problem.finish(-losses)

    return run


PEERS = (Peer("Liger per-token", prepare),)
