"""`python -m benchmarks head`: the LM head, ours and the peers', in one run on one device.

On the same inputs, judged by an oracle, beside one product.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .accuracy import Oracle, consult
from .contest import FLOPS, Contest, Entrant, Prepared
from .goals import is_goal, verdicts
from .live_tiles import given_histogram
from .machine import multiplication
from .measure import TooSlow, Unsupported, failure_of
from .peers import Peer, all_peers, choose
from .problem import FORWARD, LOSSES, MODES, PRODUCT, Outcome, Problem, Run, Setting
from .rows import KINDS, Source, describe, load_real_rows, make_problems
from .session import add_common_arguments, add_sizes, check_common, run_session

SIZES = {  # the most telling first
    "tokens": ((16_384, 4096, 65_536, 1024), (256,), "tokens N"),
    "hidden": ((2048, 4096, 896, 1536), (128,), "hidden sizes H"),
    "vocab": ((151_936, 128_256, 32_000, 262_144), (4096, 8000), "vocabularies V"),
}


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


def settings_of(
    axes: Mapping[str, Sequence[Any]],
    *,
    losses_at_all_sizes: bool = False,
    real_shape: tuple[int, int] | None = None,
) -> list[Setting]:
    """All settings, the design's goal rows first, then by distance from the first value of every axis.

    Every other loss counts as next to the first: they differ in little but the end.

    Args:
        axes: values of each field of `Setting`, the most telling first.
        losses_at_all_sizes: or those after the first at the first sizes alone.
        real_shape: (V, H) of the model whose own rows were given; "real" has no others.
    """
    ranked: dict[Setting, tuple[bool, int]] = {}
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        at = dict(zip(axes, places, strict=True))
        loss = at.pop("loss")
        if loss and (at["tokens"] or at["hidden"] or at["vocabulary"]) and not losses_at_all_sizes:
            continue
        fields = {name: values[place] for (name, values), place in zip(axes.items(), places, strict=True)}
        if fields["rows"] == "real":
            fields["vocabulary"], fields["hidden"] = real_shape
        fields["trainable"] = fields["trainable"] or fields["mode"] == FORWARD
        setting = Setting(**fields)
        rank = (not is_goal(fields), sum(at.values()) + bool(loss))
        ranked[setting] = min(rank, ranked.get(setting, rank))
    return sorted(ranked, key=lambda setting: ranked[setting])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8)
    add_sizes(parser, SIZES, nargs="+")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="both unless given")
    parser.add_argument(
        "--loss",
        nargs="+",
        choices=LOSSES,
        help="all unless given, those after logprob at the first sizes alone",
    )
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--frozen", action="store_true", help="only with a frozen head")
    head.add_argument("--trainable", action="store_true", help="only with a trainable head")
    parser.add_argument("--rows", nargs="+", choices=KINDS, help="those that can be made, unless given")
    parser.add_argument("--real-rows", type=Path, metavar="FILE", help="safetensors: hidden, target, weight")
    parser.add_argument(
        "--histogram",
        type=Path,
        metavar="FILE",
        help="live tiles of a model's rows, JSON (on a GPU the checked-in one of Qwen2.5-Coder-1.5B)",
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations left out")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    real = None if options.real_rows is None else load_real_rows(options.real_rows)
    sources: dict[str, Source] = {"real": real, "histogram": given_histogram(options.histogram, device)}
    usual = [kind for kind in ("real", "histogram", "peaked", "flat") if sources.get(kind, kind) is not None]
    rows = options.rows or usual
    for kind, flag in (("real", "--real-rows"), ("histogram", "--histogram")):
        if kind in rows and sources[kind] is None:
            raise ValueError(f"--rows {kind} needs {flag} FILE; `python -m benchmarks rows` makes one")
    axes = {
        "rows": rows,
        "mode": options.mode,
        "trainable": (True,) if options.trainable else (False,) if options.frozen else (True, False),
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocabulary": options.vocab,
        "loss": options.loss or LOSSES,
        "dtype": (options.dtype,),
    }
    settings = settings_of(
        axes,
        losses_at_all_sizes=options.loss is not None,
        real_shape=None if real is None else tuple(real.weight.shape),
    )
    peers = [peer for peer in choose(all_peers(), options.impl) if peer.name not in options.without]
    heads = HeadContests(peers, device, options.seed)
    contests = [heads.contest(setting, sources.get(setting.rows)) for setting in settings]
    notes = list(dict.fromkeys(describe(setting, sources.get(setting.rows)) for setting in settings))
    code = run_session(options, contests, notes=notes)
    if device.type == "cuda":
        print("Goals of the design (N = 16,384, a model's rows or made to match its live tiles):")
        for verdict in verdicts([found for contest in contests for found in contest.results()]):
            print(f"  {verdict}")
    return code
