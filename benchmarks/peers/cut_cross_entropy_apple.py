"""Apple's Cut Cross Entropy: with its gradient filter, which is the default, and without."""

from __future__ import annotations

from functools import partial

from benchmarks.peers.protocol import Peer, require_cuda
from benchmarks.problem import Problem, Run


def prepare(problem: Problem, filter_eps: str | None) -> Run:
    require_cuda(problem)
    from cut_cross_entropy import linear_cross_entropy

    def run():
        losses = linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, reduction="none", filter_eps=filter_eps
        )
        return problem.finish(-losses.float())

    return run


PEERS = (
    Peer("Cut Cross Entropy (filtered)", partial(prepare, filter_eps="high")),
    Peer("Cut Cross Entropy (exact)", partial(prepare, filter_eps=None)),
)
