"""verl's Triton kernel, which always forms the entropy too."""

from __future__ import annotations

from ..problem import Problem, Run
from . import Peer, require_cuda


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    temperature, reduction, process_group = 1.0, "none", None

    def run():
        logprobs, _ = linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, temperature, reduction, process_group
        )
        return problem.finish(logprobs)

    return run


PEERS = (Peer("verl Triton", prepare),)
