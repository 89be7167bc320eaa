"""The head's implementations as a contest: on the same inputs, judged by an oracle, beside one product."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .accuracy import Oracle, consult
from .contest import FLOPS, Contest, Entrant, Prepared
from .machine import multiplication
from .measure import TooSlow, Unsupported, failure_of
from .peers import Peer
from .problem import PRODUCT, Outcome, Problem, Run, Setting
from .rows import Source, make_problems


@dataclass
class HeadContests:
    """Makes the contest of each setting; a peer that is missing or too slow in one is not asked again."""

    peers: Sequence[Peer]
    device: torch.device
    seed: int = 0
    judged: bool = True
    _given_up: dict[str, str] = field(default_factory=dict)  # reasons by name

    def contest(
        self, setting: Setting, source: Source = None, *, others: Sequence[Entrant] = (), **more: Any
    ) -> Contest:
        """
        Args:
            others: entrants beside the peers and the product.
            more: what the shape says besides the setting.
        """
        problems: list[Problem] = []
        oracle: list[Oracle] = []  # of the first problem

        def share() -> None:
            if "torch._inductor.compile_fx" in sys.modules:  # somebody compiled: loading it takes seconds
                # Dynamo runs a function uncompiled, and says little, once it has seen it at eight shapes.
                torch.compiler.reset()
            problems.extend(make_problems(setting, self.device, self.seed, source))
            oracle.extend(map(consult, problems[:1] if self.judged else []))

        def multiply() -> Prepared:
            operands = [(problem.hidden.detach(), problem.weight.detach()) for problem in problems]
            work = {FLOPS: setting.product_flops}
            return Prepared(multiplication(operands), work, lambda seconds: {"product_seconds": seconds})

        entrants = [Entrant(PRODUCT, multiply, ceiling=True)]
        for peer in self.peers:
            entrants.append(Entrant(peer.name, partial(self._prepare, peer, setting, problems, oracle)))
        shape = more | vars(setting)
        found = [*entrants, *others]
        return Contest(shape, found, self.device, share=share, release=problems.clear, hurry=True)

    def _prepare(
        self, peer: Peer, setting: Setting, problems: Sequence[Problem], oracle: Sequence[Oracle]
    ) -> Prepared:
        """Runs each batch once, and keeps what the first gave of errors and certificate."""
        if peer.name in self._given_up:
            raise Unsupported(self._given_up[peer.name])
        start = time.perf_counter()
        metrics = {"output_bytes": float(problems[0].output_bytes)}
        accuracy: dict[str, float] = {}
        runs: list[Run] = []
        try:
            for problem in problems:
                runs.append(peer.prepare(problem))
                outcome = _call(runs[-1], problem)
                if problem is problems[0]:
                    metrics["first_call_seconds"] = time.perf_counter() - start
                    metrics |= {name: float(value) for name, value in (outcome.certificate or {}).items()}
                    accuracy = oracle[0].judge(problem, outcome) if oracle else {}
                del outcome
                problem.clear()
        except (ImportError, TooSlow) as error:
            _, self._given_up[peer.name] = failure_of(error)
            raise
        finally:
            _clear(problems)
        turns = itertools.cycle(zip(runs, problems, strict=True))
        return Prepared(
            lambda _: _call(*next(turns)),
            metrics=lambda seconds: metrics | setting.rates(seconds),
            found={"accuracy": accuracy},
            reset=partial(_clear, problems),
        )


def _call(run: Run, problem: Problem) -> Outcome:
    with torch.set_grad_enabled(problem.backward):
        return run()


def _clear(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear()
