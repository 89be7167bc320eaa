"""The implementations: ours, the peers', and those that installed packages offer.

A package adds its own by an entry point of the group `grpo_fast.benchmark_peers` that names a `Peer`, or
anything else with a `name` and a `prepare`, or a sequence of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from torch import Tensor

from ..measure import Unsupported
from ..problem import CROSS_ENTROPY, NAMES, Problem, Run

ENTRY_POINT_GROUP = "grpo_fast.benchmark_peers"
MODULES = ("ours", "functions", "liger")

__all__ = ["Peer", "Unsupported", "all_peers", "choose", "require_cuda", "require_loss"]

Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden (N, H), weight (V, H) and targets (N,)


@dataclass(frozen=True)
class Peer:
    """An implementation of the head.

    `prepare(problem)` imports what it needs and returns a callable that computes `problem`'s loss, and its
    gradients into `hidden.grad` and `weight.grad` where `problem.backward`. It raises ImportError where its
    library is missing and `Unsupported` where it cannot do this. Nothing heavy may be imported before.
    """

    name: str
    prepare: Callable[[Problem], Run]


def of_logprobs(name: str, load: Callable[[], Function], *, cuda: bool = False) -> Peer:
    """A peer whose function gives log-probabilities (N,)."""

    def prepare(problem: Problem) -> Run:
        if cuda:
            require_cuda(problem)
        function = load()
        return lambda: problem.finish(function(problem.hidden, problem.weight, problem.targets))

    return Peer(name, prepare)


def of_cross_entropy(
    name: str, load: Callable[[str], Function], *, cuda: bool = False, alone: bool = False
) -> Peer:
    """A peer whose function gives cross-entropies (N,) by the reduction "none", () by "mean".

    Args:
        alone: by "mean" alone, and so for no other loss.
    """

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
    """Ours first. Importing a peer's file imports nothing of the peer."""
    peers = [peer for name in MODULES for peer in importlib.import_module(f"{__name__}.{name}").PEERS]
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        peers += _load(entry)
    return peers


def choose(peers: list[Peer], wanted: list[str] | None) -> list[Peer]:
    """Those whose name contains one of the wanted words, in any case; all where none is given.

    Raises:
        ValueError: a word that fits no name.
    """
    names = choose_names([peer.name for peer in peers], wanted)
    return [peer for peer in peers if peer.name in names]


def choose_names(names: list[str], wanted: list[str] | None) -> list[str]:
    """As `choose`, of names alone."""
    for word in wanted or ():
        if not any(word.lower() in name.lower() for name in names):
            known = ", ".join(map(repr, names))
            raise ValueError(f"--impl {word!r} is part of no implementation's name; there are {known}")
    return [name for name in names if not wanted or any(word.lower() in name.lower() for word in wanted)]


def _load(entry: EntryPoint) -> list[Peer]:
    """A broken plugin becomes a peer that raises, so that its failure shows in the table."""
    try:
        found = entry.load()
        found = [found] if hasattr(found, "prepare") else list(found)
        wrong = [item for item in found if not callable(getattr(item, "prepare", None))]
        if wrong:
            raise TypeError(f"entry point {entry.name!r} gives {wrong[0]!r}: it has no `prepare(problem)`")
        return [Peer(item.name, item.prepare) for item in found]
    except Exception as error:
        failure = error

        def prepare(_: Problem) -> Run:
            raise failure

        return [Peer(entry.name, prepare)]
