"""torch.nn.functional.linear_cross_entropy, with its own choice of chunks, where torch has it."""

from __future__ import annotations

import torch

from ..problem import Problem, Run
from .protocol import Peer, Unsupported


def prepare(problem: Problem) -> Run:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unsupported(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()

    def run():
        losses = torch.nn.functional.linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, reduction="none", options=options
        )
        return problem.finish(-losses.float())

    return run


PEERS = (Peer("torch linear_cross_entropy", prepare),)
