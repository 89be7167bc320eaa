"""torch.nn.functional.linear_cross_entropy, with its own choice of chunks, where torch has it."""

from __future__ import annotations

import torch

from ..problem import CROSS_ENTROPY, Outcome, Problem, Run
from . import Peer, Unsupported


def prepare(problem: Problem) -> Run:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unsupported(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    mean = problem.loss == CROSS_ENTROPY

    def run() -> Outcome:
        found = torch.nn.functional.linear_cross_entropy(
            problem.hidden,
            problem.weight,
            problem.targets,
            reduction="mean" if mean else "none",
            options=options,
        )
        return problem.finish_loss(found) if mean else problem.finish(-found.float())

    return run


PEERS = (Peer("torch linear_cross_entropy", prepare),)
