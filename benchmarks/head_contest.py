"""The head's implementations as a contest: on the same inputs, judged by an oracle, beside one product."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
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
from .rows import Source, make_problems


@dataclass
class HeadContests:
    """Makes the contest of each setting; a peer that is missing or too slow in one is not asked again."""

    peers: Sequence[Peer]
    device: torch.device
    seed: int = 0
    judged: bool = True
    limits: Mapping[str, float] | None = None  # errors by name beyond which a peer has failed
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
            work = Work(flops=setting.product_flops)
            return Prepared(multiplication(operands), work, lambda seconds: {"product_seconds": seconds})

        entrants = [Entrant(PRODUCT, multiply, ceiling=True)]
        for peer in self.peers:
            entrants.append(Entrant(peer.name, partial(self._prepare, peer, setting, problems, oracle)))
        entrants += others
        shape = more | vars(setting)
        return Contest(shape, entrants, self.device, share=share, release=problems.clear, hurry=True)

    def _prepare(
        self, peer: Peer, setting: Setting, problems: Sequence[Problem], oracle: Sequence[Oracle]
    ) -> Prepared:
        """Runs each batch once, and keeps what the first gave of errors and certificate."""
        if peer.name in self._given_up:
            raise Unsupported(self._given_up[peer.name])
        start = time.perf_counter()
        metrics: dict[str, float] = {}
        accuracy: dict[str, float] = {}
        runs: list[Run] = []
        try:
            for problem in problems:
                runs.append(peer.prepare(problem))
                outcome = _call(runs[-1], problem)
                if problem is problems[0]:
                    metrics["first_call_seconds"] = time.perf_counter() - start
                    metrics["output_bytes"] = float(problem.output_bytes)
                    metrics |= {name: float(value) for name, value in (outcome.certificate or {}).items()}
                    accuracy = oracle[0].judge(problem, outcome) if oracle else {}
                    self._refuse(accuracy)
                del outcome
                problem.clear()
        except (ImportError, TooSlow) as error:
            missing = isinstance(error, ImportError)
            self._given_up[peer.name] = f"{NOT_INSTALLED}: {error}" if missing else str(error)
            raise
        finally:
            _clear(problems)
        turns = itertools.cycle(zip(runs, problems, strict=True))
        return Prepared(
            lambda _: _call(*next(turns)),
            metrics=lambda seconds: metrics | setting.rates(seconds),
            accuracy=accuracy,
            reset=partial(_clear, problems),
        )

    def _refuse(self, accuracy: Mapping[str, float]) -> None:
        limits = self.limits or {}
        wrong = [
            f"{name.replace('_', ' ')} off by {error:.1e}"
            for name, error in accuracy.items()
            if name in limits and not error <= limits[name]
        ]
        if wrong:
            raise ArithmeticError(f"WRONG: {', '.join(wrong)}")


def _call(run: Run, problem: Problem) -> Outcome:
    with torch.set_grad_enabled(problem.backward):
        return run()


def _clear(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.clear()
