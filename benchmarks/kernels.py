"""`python -m benchmarks kernels`: each kernel of ours alone, against what the device can do at best.

A kernel is called with what the head itself gave it in one forward and backward; on a CPU the parts of the
torch path stand in for the kernels. The ceilings are measured
among them: the product X Wᵀ by the vendor's library on operands of the same shape, and a copy. `of ceiling`
is the roofline: the time that the kernel's arithmetic and its least traffic (each operand read once, each
result written once) need at those rates, as a part of the time it took.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from grpo_fast.kernels import TILE, cuda
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.call import (
    HeadCall,
    HeadGradients,
    RowGradients,
    RowStatistics,
    SavedForBackward,
    Wanted,
)
from grpo_fast.head.operator import device_facts
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import HeadPlan, Workload, plan_head

from . import machine
from .contest import BYTES, FLOPS, Contest, Entrant, Prepared
from .live_tiles import given_histogram
from .measure import Unsupported
from .peers import choose_names
from .problem import FORWARD_BACKWARD, Problem, Setting
from .rows import make_problems
from .session import ByDevice, add_common_arguments, add_sizes, check_common, run_session

SIZES = {
    "tokens": ([16_384], [256], "tokens N"),
    "hidden": ([2048, 4096], [256], "hidden sizes H"),
    "vocab": ([151_936], [8192], "vocabularies V"),
}
_OF_HEAD = ("gather_rows", "tile_statistics", "row_results", "select_live", "dense_backward")
_SPARSE = ("list_pairs", "pair_gradients", "weight_gradient", "keep_entries", "hidden_gradient")
_BOTH = Wanted(hidden=True, weight=True, bias=False)


class Head:
    """The forward and the backward of one batch, as its plan has them, and their kernels alone."""

    def __init__(self, source: Problem) -> None:
        self.problem = HeadCall(source.hidden.detach(), source.weight.detach(), source.targets)
        self.rows, self.depth = self.problem.hidden.shape
        self.tiles = -(-self.problem.vocabulary // TILE)
        self.gradients = RowGradients(-source.advantages / self.rows)
        device, dtype = source.hidden.device, source.hidden.dtype
        work = Workload(self.rows, self.problem.vocabulary, dtype, tolerance=1.0, hidden_size=self.depth)
        self.plan: HeadPlan = plan_head(device_facts(device.type, device.index), work)

    def forward(self) -> tuple[RowStatistics, SavedForBackward]:
        from grpo_fast.head import accelerated

        return accelerated.forward(self.problem, self.plan)

    def backward(
        self, forward: tuple[RowStatistics, SavedForBackward], wanted: Wanted = _BOTH, *, exact: bool = False
    ) -> HeadGradients:
        from grpo_fast.head import accelerated

        plan = replace(self.plan, tolerance=0.0) if exact else self.plan
        statistics, state = forward
        certificate = Certificate.pending(self.problem.hidden.device)
        given = self.problem, statistics, self.gradients, wanted, state, certificate
        return accelerated.backward(*given, plan)

    @cached_property
    def calls(self) -> dict[str, partial[Any]]:
        """By function, its last call in a forward, a dense and a sparse backward, ready to be made again."""
        from grpo_fast.kernels import sparse

        from grpo_fast.head import accelerated

        modules = dict.fromkeys(_OF_HEAD, accelerated) | dict.fromkeys(_SPARSE, sparse)
        functions = {name: getattr(module, name) for name, module in modules.items()}
        with ExitStack() as stack:
            spies = {
                name: stack.enter_context(mock.patch.object(modules[name], name, wraps=function))
                for name, function in functions.items()
            }
            forward = self.forward()
            self.backward(forward, exact=True)
            self.backward(forward)
        calls = {name: spy.call_args for name, spy in spies.items()}
        return {name: partial(functions[name], *call.args, **call.kwargs) for name, call in calls.items()}

    def pairs_and_entries(self) -> object:
        """The search for entries overwrites the gradients that it is given."""
        search, gradients = self.calls["keep_entries"], self.calls["pair_gradients"]()
        return search.func(search.args[0], gradients, *search.args[2:])

    def count_pairs(self, *, library: bool) -> Tensor:
        from grpo_fast.kernels import select

        if library and not cuda.LIBRARY.is_file():
            raise Unsupported("csrc/ was not built: install with nvcc on the path")
        problem, rows, tile_lse = self.calls["select_live"].args
        count = cuda.count_pairs if library else select.count_pairs
        return count(select.Masses(tile_lse, problem.targets, rows, problem.vocabulary))

    def dense(self, *names: str) -> None:
        """The logit gradient, and from it those of these names."""
        call = self.calls["dense_backward"]
        problem, gradient, _ = call.args
        call.func(problem, gradient, _wanted(*names), **call.keywords)

    def torch_forward(self, *, jacobian: bool = False) -> RowStatistics:
        return reference.forward(self.problem._replace(jacobian=jacobian), self.plan.chunks)[0]

    def torch_backward(self, *names: str) -> None:
        """Of the statistics of one forward."""
        certificate = Certificate.pending(self.problem.hidden.device)
        given = self.problem, self.torch_statistics, self.gradients, _wanted(*names), certificate
        reference.backward(*given, self.plan.chunks)

    @cached_property
    def torch_statistics(self) -> RowStatistics:
        return self.torch_forward()

    @cached_property
    def pairs(self) -> int:
        """Kept ones."""
        return int(self.calls["list_pairs"].args[0].count.sum())

    @cached_property
    def entries(self) -> int:
        """Of dX's sparse product."""
        return int(self.calls["hidden_gradient"].args[2].sum())


def _wanted(*names: str) -> Wanted:
    return Wanted("hidden" in names, "weight" in names, False)


Call, Work = Callable[[Head], object], Callable[[Head], dict[str, float]]
"""A kernel alone, and the work of one batch by the name of its rate."""


def _product_work(head: Head, products: int = 1, written: int = 0) -> dict[str, float]:
    hidden, weight = head.problem.hidden, head.problem.weight
    flops = products * 2.0 * hidden.numel() * len(weight)
    return {FLOPS: flops, BYTES: hidden.nbytes + weight.nbytes + written}


def _statistics_work(head: Head) -> dict[str, float]:
    return {BYTES: 4 * head.rows * head.tiles}


def _forward_work(head: Head) -> dict[str, float]:
    return _product_work(head, written=4 * head.rows * head.tiles)


def _pair_work(head: Head) -> dict[str, float]:
    gradients = head.pairs * TILE
    written = gradients * head.problem.hidden.element_size()
    return _product_work(head, written=written) | {FLOPS: 2.0 * gradients * head.depth}


def _entry_work(head: Head) -> dict[str, float]:
    """A logit and a row added to dX for each entry."""
    hidden, vocabulary = head.problem.hidden, head.problem.vocabulary
    read = min(head.entries, vocabulary) * head.depth * hidden.element_size()
    return {FLOPS: 4.0 * head.entries * head.depth, BYTES: read + 2 * hidden.nbytes}


def _gradients(run: Callable[..., object], *names: str) -> tuple[Call, Work]:
    """A product for the logits, one more for each gradient."""

    def work(head: Head) -> dict[str, float]:
        return _product_work(head, 1 + len(names), sum(getattr(head.problem, name).nbytes for name in names))

    return lambda head: run(head, *names), work


def _kernel(name: str, work: Work) -> tuple[Call, Work]:
    return lambda head: head.calls[name](), work


SPARSE = "dX, sparse"
ON_CUDA: dict[str, tuple[Call, Work]] = {
    "rows gathered": _kernel("gather_rows", lambda head: {BYTES: 3 * head.problem.hidden.nbytes}),
    "forward": _kernel("tile_statistics", _forward_work),
    "finalise": _kernel("row_results", _statistics_work),
    "select": _kernel("select_live", _statistics_work),
    "histogram, Triton": (partial(Head.count_pairs, library=False), _statistics_work),
    "histogram, CUDA C++": (partial(Head.count_pairs, library=True), _statistics_work),
    "pair gradient": _kernel("pair_gradients", _pair_work),
    "pair gradient and entries": (Head.pairs_and_entries, _pair_work),
    "dW, sparse": _kernel("weight_gradient", _pair_work),
    SPARSE: _kernel("hidden_gradient", _entry_work),
    "logit gradient, dense": _gradients(Head.dense),
    "dX, dense": _gradients(Head.dense, "hidden"),
    "dX and dW, dense": _gradients(Head.dense, "hidden", "weight"),
}
ON_CPU: dict[str, tuple[Call, Work]] = {
    "forward, torch": (Head.torch_forward, _product_work),
    "forward with dlogp/dX, torch": (
        partial(Head.torch_forward, jacobian=True),
        partial(_product_work, products=2),
    ),
    "dX, torch": _gradients(Head.torch_backward, "hidden"),
    "dW, torch": _gradients(Head.torch_backward, "weight"),
    "dX and dW, torch": _gradients(Head.torch_backward, "hidden", "weight"),
}


def entrants_of(names: Sequence[str], make: Callable[[], Sequence[Problem]]) -> list[Entrant]:
    """One for each case; the problems that `make` makes take turns."""
    heads: list[Head] = []

    @torch.no_grad()
    def prepare(name: str) -> Prepared:
        run, work = (ON_CUDA | ON_CPU)[name]
        if not heads:
            heads.extend(map(Head, make()))
        for head in heads:  # so that nothing that it rests on is made while timed
            run(head)
        first, turns, metrics = heads[0], itertools.cycle(heads), {}
        if name == SPARSE:
            metrics["density"] = first.pairs / (first.rows * first.tiles)
            metrics["entries_per_row"] = first.entries / first.rows
        repeat = torch.no_grad()(lambda _: run(next(turns)))
        return Prepared(repeat, work(first), lambda _: metrics, close=heads.clear)

    return [Entrant(name, partial(prepare, name)) for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=4)
    add_sizes(parser, SIZES, nargs="+")
    kinds = ("peaked", "flat", "histogram")
    rows = ByDevice("histogram", "peaked")
    parser.add_argument("--rows", choices=kinds, default=rows, help="(%(default)s)")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="live tiles of a model's rows, JSON")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    histogram = given_histogram(options.histogram, device)
    if options.rows == "histogram" and histogram is None:
        raise ValueError(
            "--rows histogram needs --histogram FILE, of `python -m benchmarks rows`, or --rows peaked"
        )
    names = choose_names(list(ON_CUDA if device.type == "cuda" else ON_CPU), options.impl)
    contests = []
    for v, h, n in itertools.product(options.vocab, options.hidden, options.tokens):
        setting = Setting(options.rows, n, h, v, FORWARD_BACKWARD, True, options.dtype)
        shape = {"tokens": n, "hidden": h, "vocabulary": v, "rows": options.rows, "dtype": options.dtype}
        ceilings = [machine.product(n, h, v, options.dtype, device, options.seed), machine.copy(device)]
        source = histogram if options.rows == "histogram" else None
        entrants = entrants_of(names, partial(make_problems, setting, device, options.seed, source))
        contests.append(Contest(shape, [*ceilings, *entrants], device))
    return run_session(options, contests)
