"""Unsloth's fused log-probabilities. Run only: its licence is the AGPL."""

from __future__ import annotations

from benchmarks.peers.protocol import Peer, require_cuda
from benchmarks.problem import Problem, Run


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from unsloth_zoo.fused_losses.fused_linear import fused_linear_logprobs

    shape = (problem.sequences, -1)

    def run():
        hidden = problem.hidden.view(*shape, problem.hidden.shape[1])
        return problem.finish(fused_linear_logprobs(hidden, problem.weight, problem.targets.view(shape)))

    return run


PEERS = (Peer("Unsloth fused log-probabilities", prepare),)
