"""Measure the LM head, ours and the peers', on the same inputs in one run.

An oracle judges the first result of each implementation, and a wrong one is not timed. The time of one
product X Wᵀ by the vendor's library stands beside.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .contest import Entrant, Prepared, measure_in_turns
from .oracle import Oracle, consult, require_right
from .peers import Peer, all_peers, choose
from .problem import FORWARD, LOGPROB, LOSSES, MODES, PRODUCT, Outcome, Problem, Run, Setting
from .record import Measurement
from .rows import KINDS, make_problems
from .session import add_common_arguments, add_sizes, check_common, run_session

SIZES = {  # the most telling first
    "tokens": ((16_384, 4096, 65_536, 1024), (256,), "tokens N"),
    "hidden": ((2048, 4096, 896, 1536), (128,), "hidden sizes H"),
    "vocab": ((151_936, 128_256, 32_000, 262_144), (4096, 8000), "vocabularies V"),
}


def compare(
    setting: Setting, peers: Sequence[Peer], device: torch.device, seed: int, deadline: float, rounds: int
) -> list[Measurement]:
    """Measure the peers in one setting."""
    if "torch._inductor.compile_fx" in sys.modules:
        torch.compiler.reset()  # Dynamo runs a function uncompiled once it has seen it at eight shapes
    problems = make_problems(setting, device, seed)
    oracle = consult(problems[0])

    def multiply() -> Prepared:
        operands = [(problem.hidden.detach(), problem.weight.detach()) for problem in problems]
        return Prepared(multiplication(operands))

    entrants = [Entrant(PRODUCT, multiply)]
    entrants += [Entrant(peer.name, partial(prepare, peer, problems, oracle)) for peer in peers]
    return measure_in_turns(vars(setting), entrants, device, deadline, rounds)


def prepare(peer: Peer, problems: Sequence[Problem], oracle: Oracle) -> Prepared:
    """Run each batch once, and judge the result of the first.

    Raises:
        Wrong: the result is not that of the oracle.
    """
    runs = [peer.prepare(problem) for problem in problems]
    outcome = call(runs[0], problems[0])
    metrics = {name: float(value) for name, value in (outcome.certificate or {}).items()}
    accuracy = oracle.judge(problems[0], outcome)
    require_right(accuracy)
    turns = itertools.cycle(zip(runs, problems, strict=True))

    def repeat(_: object) -> None:
        run, problem = next(turns)
        call(run, problem)
        problem.clear()

    for _ in problems:
        repeat(None)
    return Prepared(repeat, metrics, accuracy)


def multiplication(operands: Sequence[tuple[Tensor, Tensor]]) -> Callable[[object], None]:
    """Return a function of one X Wᵀ a call, of each (N, H) and (V, H) in turn, in parts where it is huge."""
    (x, w), *_ = operands
    room = torch.cuda.mem_get_info(x.device)[0] // 8 if x.is_cuda else 1 << 28  # bytes
    rows = max(1, min(len(x), room // (len(w) * x.element_size())))
    out = x.new_empty(rows, len(w))
    turns = itertools.cycle(operands)

    def run(_: object) -> None:
        x, w = next(turns)
        for part in x.split(rows):
            torch.mm(part, w.T, out=out[: len(part)])

    return run


def call(run: Run, problem: Problem) -> Outcome:
    """Run once, with gradients where the problem has a backward; those of the last time are dropped."""
    problem.clear()
    with torch.set_grad_enabled(problem.backward):
        return run()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=8)
    add_sizes(parser, SIZES, nargs="+")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="both unless given")
    losses = "all unless given, those after logprob at the first sizes alone"
    parser.add_argument("--loss", nargs="+", choices=LOSSES, help=losses)
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--frozen", action="store_true", help="only with a frozen head")
    head.add_argument("--trainable", action="store_true", help="only with a trainable head")
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=KINDS, help="all unless given")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations left out")


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """Return the settings, the first sizes of all axes first."""
    heads = (True,) if options.trainable else (False,) if options.frozen else (True, False)
    found: dict[Setting, None] = {}
    for size in itertools.product(options.tokens, options.hidden, options.vocab):
        first = size == (options.tokens[0], options.hidden[0], options.vocab[0])
        losses = options.loss or (LOSSES if first else (LOGPROB,))
        for loss, kind, mode, trainable in itertools.product(losses, options.rows, options.mode, heads):
            found[Setting(kind, *size, mode, trainable or mode == FORWARD, options.dtype, loss)] = None
    return list(found)


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    peers = [peer for peer in choose(all_peers(), options.impl) if peer.name not in options.without]
    given = peers, device, options.seed
    return run_session(options, [(vars(of), partial(compare, of, *given)) for of in settings_of(options)])
