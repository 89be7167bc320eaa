"""QuACK's cross-entropy kernel on full logits.

Its chunked forms reduce to one number and take no upstream gradient per token, so a policy gradient cannot
use them.
"""

from __future__ import annotations

from ..problem import Problem, Run
from .protocol import Peer, require_cuda


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    def run():
        losses = linear_cross_entropy_func(
            problem.hidden, problem.weight, None, problem.targets, reduction="none", inplace_backward=True
        )
        return problem.finish(-losses)

    return run


PEERS = (Peer("QuACK on full logits", prepare),)
