"""Plain torch with all logits in memory, as it is and through torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Problem, Run
from .protocol import Peer, require_cuda


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)


def prepare(problem: Problem) -> Run:
    return lambda: problem.finish(logprobs(problem.hidden, problem.weight, problem.targets))


def prepare_compiled(problem: Problem) -> Run:
    require_cuda(problem)
    compiled = torch.compile(logprobs, dynamic=False)
    return lambda: problem.finish(compiled(problem.hidden, problem.weight, problem.targets))


PEERS = (Peer("torch full logits", prepare), Peer("torch.compile", prepare_compiled))
