"""flash-attn's Triton cross-entropy on full logits, which writes their gradient over them."""

from __future__ import annotations

from ..problem import Outcome, Problem, Run
from . import Peer, require_cuda


def prepare(problem: Problem) -> Run:
    require_cuda(problem)
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    def run() -> Outcome:
        logits = problem.hidden @ problem.weight.T
        losses, _ = cross_entropy_loss(logits, problem.targets, inplace_backward=True)
        return problem.finish(-losses)

    return run


PEERS = (Peer("flash-attn on full logits", prepare),)
