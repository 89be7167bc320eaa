"""`python -m benchmarks kernels`: each kernel of ours alone, against what the device can do at best.

The ceilings are measured among them: the product X Wᵀ by the vendor's library on operands of the same shape,
and a copy. `of ceiling` is the roofline: the time that the kernel's arithmetic and its least traffic (each
operand read once, each result written once) need at those rates, as a part of the time it took. On a CPU the
parts of the plain torch path are measured in the kernels' place.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from grpo_fast.kernels import TILE
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.operator import device_facts
from grpo_fast.head.plan import HeadPlan, Workload, plan_head
from grpo_fast.head.problem import (
    HeadGradients,
    HeadProblem,
    LogitGradient,
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
from .rows import Sources, make_problems
from .session import add_common_arguments, check_common, positive, run_session

KIND = "kernels"
ROWS = ("peaked", "flat", "histogram")
_DEFAULTS = {"cuda": ((16_384,), (2048, 4096), (151_936,)), "cpu": ((256,), (256,), (8192,))}


class Batch:
    """One batch's rows, and what each kernel makes of what those before it left; kept from first use on."""

    def __init__(self, source: Problem) -> None:
        self.hidden, self.weight = source.hidden.detach(), source.weight.detach()
        self.targets = source.targets
        self.problem = HeadProblem(self.hidden, self.weight, self.targets)
        self.rows, self.depth = self.hidden.shape
        self.vocabulary = self.weight.shape[0]
        self.tiles = -(-self.vocabulary // TILE)
        self.g = -source.advantages / self.rows
        self.product_flops = 2.0 * self.rows * self.vocabulary * self.depth
        self.operand_bytes = self.hidden.nbytes + self.weight.nbytes
        self.statistics_bytes = 4 * self.tiles * self.rows

    @cached_property
    def plan(self) -> HeadPlan:
        device = self.hidden.device
        work = Workload(self.rows, self.vocabulary, self.hidden.dtype, tolerance=1.0, hidden_size=self.depth)
        return plan_head(device_facts(device.type, device.index), work)

    @cached_property
    def count(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int32, device=self.hidden.device)

    def tile_statistics(self) -> Any:
        from grpo_fast.kernels.forward import tile_statistics

        return tile_statistics(self.problem, self.count, tile=self.plan.forward_tile)

    @cached_property
    def statistics(self) -> Any:
        return self.tile_statistics()

    def row_results(self) -> Any:
        from grpo_fast.kernels.forward import row_results

        order = torch.arange(self.rows, device=self.hidden.device)
        return row_results(self.statistics, self.targets, order, self.count, self.vocabulary)

    @cached_property
    def results(self) -> RowStatistics:
        return RowStatistics(*self.row_results())

    @cached_property
    def gradient(self) -> LogitGradient:
        return LogitGradient.of(self.problem, self.results, RowGradients(self.g))

    def select(self, *, cuda: bool = False) -> Any:
        from grpo_fast.kernels.select import select_pairs

        return select_pairs(
            self.problem,
            self.gradient,
            self.statistics.lse,
            self.results.logprob,
            tolerance=self.plan.tolerance,
            config=replace(self.plan.sparse, cuda_curve=cuda, cuda_rows=False),
        )

    @cached_property
    def operands(self) -> Any:
        """The selection with everything that the sparse kernels read."""
        from grpo_fast.kernels.sparse_pairs import SparseOperands

        pairs = self.select()
        if pairs.overflow.any():
            raise Unsupported("these rows are too dense for the sparse backward: its lists overflow")
        return SparseOperands(
            self.problem,
            self.results.logsumexp,
            pairs,
            unit=torch.ones(1, device=self.hidden.device),
            row_scale=pairs.mass_gradient.abs(),
        )

    @property
    def chunks(self) -> range:
        return range(self.operands.pairs.chunk_tiles.numel() - 1)

    @cached_property
    def workspace(self) -> Tensor:
        pairs = self.operands.pairs
        size = pairs.config.chunk_workspace_pairs(self.rows, self.tiles, self.hidden.element_size())
        return self.hidden.new_empty(size, TILE)

    @cached_property
    def pair_count(self) -> int:
        return int(self.operands.pairs.total)

    def pair_gradient(self) -> Any:
        """Fills the workspace, chunk after chunk; the lists of entries."""
        from grpo_fast.kernels.sparse_pairs import pair_gradient
        from grpo_fast.kernels.sparse_rows import EntryLists

        lists = EntryLists.allocate(self.operands.pairs, self.rows)
        for chunk in self.chunks:
            pair_gradient(self.operands, self.workspace, lists, chunk)
        return lists

    @cached_property
    def lists(self) -> Any:
        return self.pair_gradient()

    @cached_property
    def entries(self) -> int:
        return int(self.lists.used[0])

    def sparse_weight(self) -> Tensor:
        from grpo_fast.kernels.sparse_weight import weight_gradient

        _ = self.lists  # whose making filled the workspace
        gradient = torch.empty_like(self.weight)
        for chunk in self.chunks:
            weight_gradient(self.operands, self.workspace, gradient, chunk, False)
        return gradient

    def sparse_hidden(self, *, cuda: bool = False) -> Any:
        from grpo_fast.kernels.sparse_rows import hidden_gradient

        pairs = self.operands.pairs
        pairs = replace(pairs, config=replace(pairs.config, cuda_rows=cuda))
        return hidden_gradient(replace(self.operands, pairs=pairs), self.lists)

    def dense(self, **needed: bool) -> HeadGradients:
        from grpo_fast.kernels.dense import dense_backward

        tile, columns = self.plan.backward_tile, self.plan.dense_columns
        return HeadGradients(
            *dense_backward(self.problem, self.gradient, _wanted(needed), tile=tile, columns=columns)
        )

    def torch_forward(self, *, jacobian: bool = False) -> tuple[RowStatistics, State]:
        return reference.forward(self.problem, Request(jacobian=jacobian), self.plan.chunks)

    @cached_property
    def torch_statistics(self) -> RowStatistics:
        return self.torch_forward()[0]

    def torch_backward(self, **needed: bool) -> HeadGradients:
        gradients, state = RowGradients(self.g), State.empty(self.problem)
        return reference.backward(
            self.problem, self.torch_statistics, gradients, _wanted(needed), state, self.plan.chunks
        )


def _wanted(needed: dict[str, bool]) -> Wanted:
    return Wanted(*(needed.get(name, False) for name in ("hidden", "weight", "bias")))


@dataclass(frozen=True)
class Case:
    """A kernel alone. `work` is of one batch, in FLOPs and bytes."""

    run: Callable[[Batch], Any]
    work: Callable[[Batch], Work]
    metrics: Callable[[Batch], dict[str, float]] = lambda _: {}
    in_cuda_library: bool = False


def _statistics_work(batch: Batch) -> Work:
    return Work(bytes=batch.statistics_bytes)


def _pair_work(batch: Batch) -> Work:
    workspace = batch.pair_count * TILE * batch.hidden.element_size()
    return Work(2.0 * batch.pair_count * TILE * batch.depth, batch.operand_bytes + workspace)


def _entry_work(batch: Batch) -> Work:
    read = min(batch.entries, batch.vocabulary) * batch.depth * batch.hidden.element_size()
    return Work(2.0 * batch.entries * batch.depth, read + batch.hidden.nbytes + 8 * batch.entries)


def _density(batch: Batch) -> dict[str, float]:
    return {"density": batch.pair_count / (batch.rows * batch.tiles)}


def _entry_density(batch: Batch) -> dict[str, float]:
    return _density(batch) | {"entries_per_row": batch.entries / batch.rows}


def _gradients(run: Callable[..., Any], *names: str) -> Case:
    """A product for the logits, one more for each gradient."""

    def work(batch: Batch) -> Work:
        results = sum(getattr(batch, name).nbytes for name in names)
        return Work((1 + len(names)) * batch.product_flops, batch.operand_bytes + results)

    return Case(partial(run, **dict.fromkeys(names, True)), work)


ON_CUDA = {
    "forward": Case(
        Batch.tile_statistics, lambda b: Work(b.product_flops, b.operand_bytes + b.statistics_bytes)
    ),
    "finalise": Case(Batch.row_results, _statistics_work),
    "select": Case(Batch.select, _statistics_work),
    "select, CUDA C++ curve": Case(partial(Batch.select, cuda=True), _statistics_work, in_cuda_library=True),
    "pair gradient": Case(Batch.pair_gradient, _pair_work, _density),
    "dW, sparse": Case(Batch.sparse_weight, _pair_work),
    "dX, sparse": Case(Batch.sparse_hidden, _entry_work, _entry_density),
    "dX, sparse, CUDA C++": Case(
        partial(Batch.sparse_hidden, cuda=True), _entry_work, _entry_density, in_cuda_library=True
    ),
    "logit gradient, dense": _gradients(Batch.dense),
    "dX, dense": _gradients(Batch.dense, "hidden"),
    "dX and dW, dense": _gradients(Batch.dense, "hidden", "weight"),
}
ON_CPU = {
    "forward, torch": Case(Batch.torch_forward, lambda b: Work(b.product_flops, b.operand_bytes)),
    "forward with dlogp/dX, torch": Case(
        partial(Batch.torch_forward, jacobian=True), lambda b: Work(2 * b.product_flops, b.operand_bytes)
    ),
    "dX, torch": _gradients(Batch.torch_backward, "hidden"),
    "dW, torch": _gradients(Batch.torch_backward, "weight"),
    "dX and dW, torch": _gradients(Batch.torch_backward, "hidden", "weight"),
}


@dataclass
class KernelInputs:
    """The batches of one shape, which take turns."""

    setting: Setting
    sources: Sources
    device: torch.device
    seed: int

    @cached_property
    def batches(self) -> list[Batch]:
        return [Batch(p) for p in make_problems(self.setting, self.sources, self.device, self.seed)]

    def entrant(self, name: str, case: Case) -> Entrant:
        return Entrant(name, partial(self._prepare, case))

    @torch.no_grad()
    def _prepare(self, case: Case) -> Prepared:
        """A batch a repetition. Each has its turn before, so that nothing it rests on is made while timed."""
        if case.in_cuda_library:
            self._require_library()
        for batch in self.batches:
            case.run(batch)
        turns = itertools.cycle(self.batches)
        run = torch.no_grad()(lambda _: case.run(next(turns)))
        first = self.batches[0]
        return Prepared(run, case.work(first), lambda _: case.metrics(first))

    def _require_library(self) -> None:
        from grpo_fast.head import cuda

        if not cuda.available():
            raise Unsupported("csrc/ was not built: install with nvcc on the path")
        if self.setting.dtype == "float32":
            raise Unsupported("csrc/ takes bfloat16 and float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, minutes=4)
    for name, what in (("tokens", "tokens N"), ("hidden", "hidden sizes H"), ("vocab", "vocabularies V")):
        parser.add_argument(f"--{name}", type=positive, nargs="+", help=what)
    parser.add_argument("--rows", choices=ROWS, help="histogram where there is one, else peaked")
    parser.add_argument("--histogram", type=Path, metavar="FILE", help="live tiles of a model's rows, JSON")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    device = check_common(options)
    sources = Sources(histogram=given_histogram(options.histogram, device))
    rows = options.rows or ("histogram" if sources.histogram else "peaked")
    if rows == "histogram" and sources.histogram is None:
        raise ValueError("--rows histogram needs --histogram FILE; `python -m benchmarks tiles` makes one")
    cases = ON_CUDA if device.type == "cuda" else ON_CPU
    names = choose_names(list(cases), options.impl)
    asked = (options.tokens, options.hidden, options.vocab)
    sizes = [given or usual for given, usual in zip(asked, _DEFAULTS[device.type], strict=True)]
    bouts = []
    for v, h, n in itertools.product(*reversed(sizes)):
        setting = Setting(rows, n, h, v, FORWARD_BACKWARD, True, options.dtype)
        inputs = KernelInputs(setting, sources, device, options.seed)
        shape = {"tokens": n, "hidden": h, "vocabulary": v, "rows": rows, "dtype": options.dtype}
        ceilings = [machine.product(n, h, v, options.dtype, device, options.seed), machine.copy(device)]
        bouts.append(
            Contest(shape, [*ceilings, *(inputs.entrant(name, cases[name]) for name in names)], device)
        )
    return run_session(KIND, options, device, bouts)
