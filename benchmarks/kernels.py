"""`python -m benchmarks kernels`: each kernel of ours alone, against what the device can do at best.

A kernel is called with what the head itself gave it in one forward and backward. The ceilings are measured
among them: the product X Wᵀ by the vendor's library on operands of the same shape, and a copy. `of ceiling`
is the roofline: the time that the kernel's arithmetic and its least traffic (each operand read once, each
result written once) need at those rates, as a part of the time it took. On a CPU the parts of the plain torch
path are measured in the kernels' place.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from grpo_fast.kernels import TILE, cuda
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.operator import device_facts
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import HeadPlan, Workload, plan_head
from grpo_fast.head.problem import (
    HeadGradients,
    HeadProblem,
    Request,
    RowGradients,
    RowStatistics,
    State,
    Wanted,
)

from . import machine
from .contest import Contest, Entrant, Prepared, Work
from .live_tiles import given_histogram
from .measure import Unsupported
from .peers import choose_names
from .problem import FORWARD_BACKWARD, Problem, Setting
from .rows import make_problems
from .session import add_common_arguments, add_sizes, check_common, run_session, sizes_of

KIND = "kernels"
_SIZES = {"cuda": ((16_384,), (2048, 4096), (151_936,)), "cpu": ((256,), (256,), (8192,))}
_OF_HEAD = ("gather_rows", "tile_statistics", "row_results", "select_live", "dense_backward")
_SPARSE = ("list_pairs", "pair_gradients", "weight_gradient", "keep_entries", "hidden_gradient")
_BOTH = Wanted(hidden=True, weight=True, bias=False)


class Head:
    """The forward and the backward of one batch, as its plan has them."""

    def __init__(self, source: Problem) -> None:
        self.problem = HeadProblem(source.hidden.detach(), source.weight.detach(), source.targets)
        self.rows, self.depth = self.problem.hidden.shape
        self.tiles = -(-self.problem.vocabulary // TILE)
        self.gradients = RowGradients(-source.advantages / self.rows)
        device, dtype = source.hidden.device, source.hidden.dtype
        work = Workload(self.rows, self.problem.vocabulary, dtype, tolerance=1.0, hidden_size=self.depth)
        self.plan: HeadPlan = plan_head(device_facts(device.type, device.index), work)

    def forward(self) -> tuple[RowStatistics, State]:
        from grpo_fast.head import accelerated

        return accelerated.forward(self.problem, Request(), self.plan)

    def backward(
        self, forward: tuple[RowStatistics, State], wanted: Wanted = _BOTH, *, exact: bool = False
    ) -> HeadGradients:
        from grpo_fast.head import accelerated

        plan = replace(self.plan, tolerance=0.0) if exact else self.plan
        statistics, state = forward
        certificate = Certificate.pending(self.problem.hidden.device)
        given = self.problem, statistics, self.gradients, wanted, state, certificate
        return accelerated.backward(*given, plan)


class Batch(Head):
    """One batch's kernels, each ready to be called again as a forward and a backward called it."""

    @cached_property
    def calls(self) -> dict[str, partial[Any]]:
        """By function, the last of a dense and of a sparse backward with the forward before them."""
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

    def again(self, name: str) -> object:
        return self.calls[name]()

    def pairs_and_entries(self) -> object:
        """The search for entries overwrites the gradients that it is given."""
        search, gradients = self.calls["keep_entries"], self.again("pair_gradients")
        return search.func(search.args[0], gradients, *search.args[2:])

    def mass_curve(self, *, library: bool) -> Tensor:
        from grpo_fast.kernels.select import counted_curve

        problem, rows, tile_lse = self.calls["select_live"].args
        curve = cuda.mass_curve if library else counted_curve
        of_rows = rows.logsumexp, problem.targets, rows.target, rows.mass
        return curve(tile_lse, *of_rows, vocabulary=problem.vocabulary)

    @cached_property
    def pairs(self) -> int:
        """Live ones."""
        return int(self.calls["list_pairs"].args[0].found[0])

    @cached_property
    def entries(self) -> int:
        """Of dX's sparse product."""
        return int(self.calls["hidden_gradient"].args[-1].sum())

    def dense(self, *names: str) -> None:
        """The logit gradient, and from it those of these names."""
        call = self.calls["dense_backward"]
        problem, gradient, _ = call.args
        call.func(problem, gradient, _wanted(*names), **call.keywords)

    def torch_forward(self, *, jacobian: bool = False) -> tuple[RowStatistics, State]:
        return reference.forward(self.problem, Request(jacobian=jacobian), self.plan.chunks)

    @cached_property
    def torch_statistics(self) -> RowStatistics:
        return self.torch_forward()[0]

    def torch_backward(self, *names: str) -> None:
        upstream = self.torch_statistics, self.gradients
        certificate = Certificate.pending(self.problem.hidden.device)
        reference.backward(self.problem, *upstream, _wanted(*names), certificate, self.plan.chunks)


def _wanted(*names: str) -> Wanted:
    return Wanted("hidden" in names, "weight" in names, False)


@dataclass(frozen=True)
class Case:
    """A kernel alone. `work` is of one batch."""

    run: Callable[[Batch], object]
    work: Callable[[Batch], Work]
    metrics: Callable[[Batch], dict[str, float]] = lambda _: {}
    in_library: bool = False  # that `csrc/` builds


def _product_work(batch: Batch, products: int = 1, written: int = 0) -> Work:
    hidden, weight = batch.problem.hidden, batch.problem.weight
    return Work(products * 2.0 * hidden.numel() * len(weight), hidden.nbytes + weight.nbytes + written)


def _statistics_bytes(batch: Batch) -> int:
    return 4 * batch.rows * batch.tiles


def _pair_work(batch: Batch) -> Work:
    gradients = batch.pairs * TILE
    written = gradients * batch.problem.hidden.element_size()
    return Work(2.0 * gradients * batch.depth, _product_work(batch, written=written).bytes)


def _entry_work(batch: Batch) -> Work:
    """A logit and a row added to dX for each entry."""
    hidden, vocabulary = batch.problem.hidden, batch.problem.vocabulary
    read = min(batch.entries, vocabulary) * batch.depth * hidden.element_size()
    return Work(4.0 * batch.entries * batch.depth, read + 2 * hidden.nbytes)


def _density(batch: Batch) -> dict[str, float]:
    density = batch.pairs / (batch.rows * batch.tiles)
    return {"density": density, "entries_per_row": batch.entries / batch.rows}


def _gradients(run: Callable[..., object], *names: str) -> Case:
    """A product for the logits, one more for each gradient."""

    def work(batch: Batch) -> Work:
        written = sum(getattr(batch.problem, name).nbytes for name in names)
        return _product_work(batch, 1 + len(names), written)

    return Case(lambda batch: run(batch, *names), work)


def _kernel(name: str, work: Callable[[Batch], Work], **more: Any) -> Case:
    return Case(lambda batch: batch.again(name), work, **more)


def _curve(*, library: bool) -> Case:
    run = partial(Batch.mass_curve, library=library)
    return Case(run, lambda batch: Work(bytes=_statistics_bytes(batch)), in_library=library)


ON_CUDA = {
    "rows gathered": _kernel("gather_rows", lambda b: Work(bytes=3 * b.problem.hidden.nbytes)),
    "forward": _kernel("tile_statistics", lambda b: _product_work(b, written=_statistics_bytes(b))),
    "finalise": _kernel("row_results", lambda b: Work(bytes=_statistics_bytes(b))),
    "select": _kernel("select_live", lambda b: Work(bytes=_statistics_bytes(b))),
    "mass curve, counted": _curve(library=False),
    "mass curve, CUDA C++": _curve(library=True),
    "pair gradient": _kernel("pair_gradients", _pair_work),
    "pair gradient and entries": Case(Batch.pairs_and_entries, _pair_work),
    "dW, sparse": _kernel("weight_gradient", _pair_work),
    "dX, sparse": _kernel("hidden_gradient", _entry_work, metrics=_density),
    "logit gradient, dense": _gradients(Batch.dense),
    "dX, dense": _gradients(Batch.dense, "hidden"),
    "dX and dW, dense": _gradients(Batch.dense, "hidden", "weight"),
}
ON_CPU = {
    "forward, torch": Case(Batch.torch_forward, _product_work),
    "forward with dlogp/dX, torch": Case(
        partial(Batch.torch_forward, jacobian=True), partial(_product_work, products=2)
    ),
    "dX, torch": _gradients(Batch.torch_backward, "hidden"),
    "dW, torch": _gradients(Batch.torch_backward, "weight"),
    "dX and dW, torch": _gradients(Batch.torch_backward, "hidden", "weight"),
}


def entrants_of(cases: Mapping[str, Case], make: Callable[[], Sequence[Problem]]) -> list[Entrant]:
    """One for each case; the problems that `make` makes take turns."""
    batches: list[Batch] = []

    @torch.no_grad()
    def prepare(case: Case) -> Prepared:
        if case.in_library and not cuda.LIBRARY.is_file():
            raise Unsupported("csrc/ was not built: install with nvcc on the path")
        if not batches:
            batches.extend(map(Batch, make()))
        for batch in batches:  # so that nothing that it rests on is made while timed
            case.run(batch)
        turns, metrics = itertools.cycle(batches), case.metrics(batches[0])
        run = torch.no_grad()(lambda _: case.run(next(turns)))
        return Prepared(run, case.work(batches[0]), lambda _: metrics, close=batches.clear)

    return [Entrant(name, partial(prepare, case)) for name, case in cases.items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=4)
    add_sizes(parser)
    kinds = ("peaked", "flat", "histogram")
    parser.add_argument("--rows", choices=kinds, help="histogram where there is one, else peaked")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="live tiles of a model's rows, JSON")


def main(options: argparse.Namespace) -> int:
    device = check_common(options)
    histogram = given_histogram(options.histogram, device)
    rows = options.rows or ("histogram" if histogram else "peaked")
    if rows == "histogram" and histogram is None:
        raise ValueError("--rows histogram needs --histogram FILE; `python -m benchmarks rows` makes one")
    cases = ON_CUDA if device.type == "cuda" else ON_CPU
    cases = {name: cases[name] for name in choose_names(list(cases), options.impl)}
    bouts = []
    for v, h, n in itertools.product(*reversed(sizes_of(options, _SIZES[device.type]))):
        setting = Setting(rows, n, h, v, FORWARD_BACKWARD, True, options.dtype)
        shape = {"tokens": n, "hidden": h, "vocabulary": v, "rows": rows, "dtype": options.dtype}
        ceilings = [machine.product(n, h, v, options.dtype, device, options.seed), machine.copy(device)]
        source = histogram if rows == "histogram" else None
        entrants = entrants_of(cases, partial(make_problems, setting, device, options.seed, source))
        bouts.append(Contest(shape, [*ceilings, *entrants], device))
    return run_session(KIND, options, device, bouts)
