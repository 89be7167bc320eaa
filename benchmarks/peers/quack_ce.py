"""QuACK's cross-entropy: its kernel on full logits, and its chunked form.

The chunked form reduces to one number and takes no upstream gradient per token: for cross-entropy alone.
"""

from __future__ import annotations

from ..problem import CROSS_ENTROPY, Outcome, Problem, Run
from . import Peer, require_cuda, require_loss


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from quack.linear_cross_entropy import linear_cross_entropy_func

    def run() -> Outcome:
        losses = linear_cross_entropy_func(
            problem.hidden, problem.weight, None, problem.targets, reduction="none", inplace_backward=True
        )
        return problem.finish(-losses)

    return run


def prepare_chunked(problem: Problem) -> Run:
    require_loss(problem, CROSS_ENTROPY)
    require_cuda(problem)
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda: problem.finish_loss(
        chunked_linear_cross_entropy(problem.hidden, problem.weight, problem.targets, reduction="mean")
    )


PEERS = (Peer("QuACK on full logits", prepare), Peer("QuACK chunked cross-entropy", prepare_chunked))
