"""The head's implementations as a contest: on the same inputs, judged by an oracle, beside one product."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .accuracy import Oracle, consult
from .contest import Contest, Entrant, Prepared, Work
from .machine import multiplication
from .measure import NOT_INSTALLED, TooSlow, Unsupported
from .peers import Peer
from .problem import PRODUCT, Outcome, Problem, Run, Setting
from .rows import Sources, make_problems


@dataclass
class HeadContests:
    """Makes the contest of each setting; a peer that is missing or too slow in one is not asked again."""

    peers: Sequence[Peer]
    sources: Sources
    device: torch.device
    seed: int = 0
    judged: bool = True
    _given_up: dict[str, str] = field(default_factory=dict)  # reasons by name

    def contest(self, setting: Setting, **more: Any) -> Contest:
        """
        Args:
            more: what the shape says besides the setting.
        """
        inputs = _Inputs(self, setting)
        entrants = [Entrant(PRODUCT, partial(_product, inputs), ceiling=True)]
        entrants += [Entrant(peer.name, partial(self._prepare, peer, inputs)) for peer in self.peers]
        return Contest(more | vars(setting), entrants, self.device, share=inputs.make, hurry=True)

    def _prepare(self, peer: Peer, inputs: _Inputs) -> Prepared:
        if peer.name in self._given_up:
            raise Unsupported(self._given_up[peer.name])
        try:
            return inputs.prepare(peer)
        except ImportError as error:
            self._given_up[peer.name] = f"{NOT_INSTALLED}: {error}"
            raise
        except TooSlow as error:
            self._given_up[peer.name] = str(error)
            raise


class _Inputs:
    """The batches of one setting; the first is judged."""

    def __init__(self, of: HeadContests, setting: Setting) -> None:
        self.of = of
        self.setting = setting
        self.problems: list[Problem] = []
        self.oracle: Oracle | None = None

    def make(self) -> None:
        if "torch._inductor.compile_fx" in sys.modules:  # somebody compiled: loading it takes seconds
            # Dynamo runs a function uncompiled, and says little, once it has seen it at eight shapes.
            torch.compiler.reset()
        self.problems = make_problems(self.setting, self.of.sources, self.of.device, self.of.seed)
        self.oracle = consult(self.problems[0]) if self.of.judged else None

    def clear(self) -> None:
        for problem in self.problems:
            problem.clear()

    def prepare(self, peer: Peer) -> Prepared:
        """Runs each batch once, and keeps what the first gave of errors and certificate."""
        start = time.perf_counter()
        metrics: dict[str, float] = {}
        accuracy: dict[str, float] = {}
        runs: list[Run] = []
        try:
            for problem in self.problems:
                runs.append(peer.prepare(problem))
                outcome = _call(runs[-1], problem)
                if problem is self.problems[0]:
                    metrics["first_call_seconds"] = time.perf_counter() - start
                    metrics["output_bytes"] = float(problem.output_bytes)
                    metrics |= {name: float(value) for name, value in (outcome.certificate or {}).items()}
                    if self.oracle is not None:
                        accuracy = self.oracle.judge(problem, outcome)
                del outcome
                problem.clear()
        except Exception:
            self.clear()
            raise
        turns = itertools.cycle(zip(runs, self.problems, strict=True))
        return Prepared(
            lambda _: _call(*next(turns)),
            metrics=lambda seconds: metrics | self.setting.rates(seconds),
            accuracy=accuracy,
            reset=self.clear,
        )


def _call(run: Run, problem: Problem) -> Outcome:
    with nullcontext() if problem.backward else torch.no_grad():
        return run()


def _product(inputs: _Inputs) -> Prepared:
    """By the vendor's library on the same operands."""
    operands = [(problem.hidden.detach(), problem.weight.detach()) for problem in inputs.problems]
    work = Work(flops=inputs.setting.product_flops)
    return Prepared(multiplication(operands), work, lambda seconds: {"product_seconds": seconds})
