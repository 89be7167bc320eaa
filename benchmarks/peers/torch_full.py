"""Plain torch with all logits in memory, as it is and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..problem import CROSS_ENTROPY, Problem, Run
from . import Peer, require_cuda


def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)


def negative_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


def prepare(problem: Problem) -> Run:
    function = _function(problem)
    return lambda: problem.finish(function(problem.hidden, problem.weight, problem.targets))


def prepare_compiled(problem: Problem) -> Run:
    require_cuda(problem)
    compiled = torch.compile(_function(problem), dynamic=False)
    return lambda: problem.finish(compiled(problem.hidden, problem.weight, problem.targets))


def _function(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return negative_cross_entropy if problem.loss == CROSS_ENTROPY else logprobs


PEERS = (Peer("torch full logits", prepare), Peer("torch.compile", prepare_compiled))
