"""The implementations of the head: ours, the peers', and those of entry points.

An entry point names a `Peer`, anything else with a `name` and a `prepare`, or a sequence of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from torch import Tensor

from ..problem import CROSS_ENTROPY, NAMES, Problem, Run, Unsupported

ENTRY_POINT_GROUP = "grpo_fast.benchmark_peers"
MODULES = ("ours", "functions", "liger")
PACKAGES = ["trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels", "unsloth-zoo", "flash-attn"]
PACKAGES += ["RL-Kernel"]

__all__ = ["Peer", "Unsupported", "all_peers", "peer_named", "require_cuda", "require_loss", "versions"]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden (N, H), weight (V, H) and targets (N,)


@dataclass(frozen=True)
class Peer:
    """An implementation of the head.

    `prepare(problem)` imports what it needs and returns a callable that computes the loss, and its gradients
    into `hidden.grad` and `weight.grad` where `problem.backward`. It raises ImportError where its library is
    missing, and `Unsupported` where it cannot compute this loss.
    """

    name: str
    prepare: Callable[[Problem], Run]


def of_logprobs(name: str, load: Callable[[], Function], *, cuda: bool = False) -> Peer:
    """Make a peer of a function that returns log-probabilities (N,)."""

    def prepare(problem: Problem) -> Run:
        if cuda:
            require_cuda(problem)
        function = load()
        return lambda: problem.finish(function(problem.hidden, problem.weight, problem.targets))

    return Peer(name, prepare)


def of_cross_entropy(
    name: str, load: Callable[[str], Function], *, cuda: bool = False, alone: bool = False
) -> Peer:
    """Make a peer of a function that returns cross-entropies (N,) or their mean, `alone` the mean only."""

    def prepare(problem: Problem) -> Run:
        if alone:
            require_loss(problem, CROSS_ENTROPY)
        if cuda:
            require_cuda(problem)
        mean = problem.loss == CROSS_ENTROPY
        function = load("mean" if mean else "none")

        def run():
            found = function(problem.hidden, problem.weight, problem.targets)
            return problem.finish_loss(found) if mean else problem.finish(-found.float())

        return run

    return Peer(name, prepare)


def require_cuda(problem: Problem) -> None:
    if not problem.hidden.is_cuda:
        raise Unsupported("needs a CUDA device")


def require_loss(problem: Problem, *losses: str) -> None:
    if problem.loss not in losses:
        raise Unsupported(f"is for {' and '.join(NAMES[loss] for loss in losses)} only")


def all_peers() -> list[Peer]:
    """Return all peers, ours first, without importing their libraries."""
    peers = [peer for name in MODULES for peer in importlib.import_module(f"{__name__}.{name}").PEERS]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        peers += _load(entry)
    return peers


def peer_named(name: str) -> Peer:
    return next(peer for peer in all_peers() if peer.name == name)


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _load(entry: EntryPoint) -> list[Peer]:
    """Load the peers of an entry point; a broken one becomes a peer that raises its error."""
    try:
        found = entry.load()
        found = [found] if hasattr(found, "prepare") else list(found)
        if wrong := [item for item in found if not callable(getattr(item, "prepare", None))]:
            raise TypeError(f"entry point {entry.name!r} gives {wrong[0]!r}: it has no `prepare(problem)`")
        return [Peer(item.name, item.prepare) for item in found]
    except Exception as error:
        return [Peer(entry.name, partial(_fail, error))]


def _fail(error: Exception, _: Problem) -> Run:
    raise error
