"""TRL's fused head, with the chunk that its trainers use."""

from __future__ import annotations

from ..problem import Problem, Run
from . import Peer

CHUNK = 32_768


def prepare(problem: Problem) -> Run:
    from trl.kernels import ChunkedLogProbFunction

    bias, temperature, softcap, scale, outputs = None, 1.0, None, 1.0, ()

    def run():
        logprobs, *_ = ChunkedLogProbFunction.apply(
            problem.hidden, problem.weight, bias, problem.targets, temperature, CHUNK, softcap, scale, outputs
        )
        return problem.finish(logprobs)

    return run


PEERS = (Peer("TRL fused head", prepare),)
