"""The one protocol of an implementation under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..losses import NAMES
from ..problem import Problem, Run


class Unsupported(Exception):
    """Raised by `prepare` where an implementation cannot take a problem; the message is the reason shown."""


@dataclass(frozen=True)
class Peer:
    """An implementation of the head.

    `prepare(problem)` imports what it needs and returns a callable that computes `problem`'s loss, and its
    gradients into `hidden.grad` and `weight.grad` where `problem.backward`. It raises ImportError where its
    library is missing and `Unsupported` where it cannot do this. Nothing heavy may be imported before.
    """

    name: str
    prepare: Callable[[Problem], Run]


def require_cuda(problem: Problem) -> None:
    if not problem.hidden.is_cuda:
        raise Unsupported("needs a CUDA device")


def require_loss(problem: Problem, *losses: str) -> None:
    if problem.loss not in losses:
        raise Unsupported(f"is for {' and '.join(NAMES[loss] for loss in losses)} only")
