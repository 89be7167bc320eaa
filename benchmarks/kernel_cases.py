"""Our kernels, and the parts of the plain torch path, each as something to time alone.

All work on one batch's rows and on what the kernels before them made of it. Traffic counted is the least:
each operand read once, each result written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from grpo_fast.kernels import TILE
from torch import Tensor

from grpo_fast.head import reference
from grpo_fast.head.operator import device_facts
from grpo_fast.head.plan import HeadPlan, Workload, plan_head
from grpo_fast.head.problem import HeadProblem, Request, RowGradients

from .contest import Entrant, Prepared, Work
from .peers import Unsupported
from .problem import Problem, Setting
from .row_sources import Sources, make_problem
from .timing import cache_bytes

FORWARD, FINALISE, SELECT = "forward", "finalise", "select"
PAIRS, SPARSE_WEIGHT, SPARSE_HIDDEN = "pair gradient", "dW, sparse", "dX, sparse"
SELECT_CUDA, SPARSE_HIDDEN_CUDA = "select, CUDA C++ curve", "dX, sparse, CUDA C++"
DENSE, DENSE_HIDDEN, DENSE_BOTH = "logit gradient, dense", "dX, dense", "dX and dW, dense"
ON_CUDA = (
    *(FORWARD, FINALISE, SELECT, SELECT_CUDA, PAIRS, SPARSE_WEIGHT, SPARSE_HIDDEN, SPARSE_HIDDEN_CUDA),
    *(DENSE, DENSE_HIDDEN, DENSE_BOTH),
)
TORCH_FORWARD, TORCH_JACOBIAN = "forward, torch", "forward with dlogp/dX, torch"
TORCH_HIDDEN, TORCH_WEIGHT, TORCH_BOTH = "dX, torch", "dW, torch", "dX and dW, torch"
ON_CPU = (TORCH_FORWARD, TORCH_JACOBIAN, TORCH_HIDDEN, TORCH_WEIGHT, TORCH_BOTH)
_MOST_INPUTS = 8


def entrants(inputs: KernelInputs, names: Sequence[str]) -> list[Entrant]:
    """The named ones, in that order."""
    return [Entrant(name, partial(_CASES[name], inputs)) for name in names]


class KernelInputs:
    """The batches of one shape, enough of them that a turn finds none of its inputs in the cache."""

    def __init__(self, setting: Setting, sources: Sources, device: torch.device, seed: int) -> None:
        self.setting = setting
        self._make = lambda number: Batch(make_problem(setting, sources, device, seed + number), setting)
        self.device = device

    @cached_property
    def batches(self) -> list[Batch]:
        first = self._make(0)
        count = min(_MOST_INPUTS, 1 + 2 * cache_bytes(self.device) // first.source.input_bytes)
        return [first, *(self._make(number) for number in range(1, count))]

    def rotate(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)

    @property
    def first(self) -> Batch:
        return self.batches[0]


class Batch:
    """One batch, and what each kernel leaves for the next; made on first use."""

    def __init__(self, source: Problem, setting: Setting) -> None:
        self.source = source
        self.rows, self.vocabulary = setting.tokens, setting.vocabulary
        self.hidden, self.weight = source.hidden.detach(), source.weight.detach()
        self.targets = source.targets
        self.g = -source.advantages / setting.tokens

    @property
    def problem(self) -> HeadProblem:
        return HeadProblem(self.hidden, self.weight, self.targets)

    @property
    def tiles(self) -> int:
        return -(-self.vocabulary // TILE)

    @cached_property
    def plan(self) -> HeadPlan:
        device = self.hidden.device
        work = Workload(
            self.rows, self.vocabulary, self.hidden.dtype, tolerance=1.0, hidden_size=self.hidden.shape[1]
        )
        return plan_head(device_facts(device.type, device.index), work)

    @cached_property
    def order(self) -> Tensor:
        return torch.arange(self.rows, device=self.hidden.device)

    @cached_property
    def count(self) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int32, device=self.hidden.device)

    def tile_statistics(self) -> Any:
        from grpo_fast.kernels.forward import Wanted, tile_statistics

        return tile_statistics(
            self.hidden,
            self.weight,
            self.targets,
            self.count,
            bias=None,
            inv_temperature=None,
            logit_scale=1.0,
            softcap=None,
            wanted=Wanted(),
            tile=self.plan.forward_tile,
        )

    @cached_property
    def statistics(self) -> Any:
        return self.tile_statistics()

    def row_results(self) -> Any:
        from grpo_fast.kernels.forward import row_results

        return row_results(self.statistics, self.targets, self.order, self.count, self.vocabulary)

    @cached_property
    def results(self) -> Any:
        return self.row_results()

    def select(self, *, cuda: bool = False) -> Any:
        from grpo_fast.kernels.select import select_pairs

        return select_pairs(
            self.statistics.lse,
            self.results.logsumexp,
            self.targets,
            self.results.logprob,
            self.g,
            vocabulary=self.vocabulary,
            tolerance=self.plan.tolerance,
            itemsize=self.hidden.element_size(),
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
            self.hidden,
            self.weight,
            self.targets,
            self.results.logsumexp,
            bias=None,
            inv_temperature=None,
            logit_scale=1.0,
            softcap=None,
            pairs=pairs,
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

    def sparse_weight(self) -> Tensor:
        from grpo_fast.kernels.sparse_weight import weight_gradient

        gradient = torch.empty_like(self.weight)
        for chunk in self.chunks:
            weight_gradient(self.operands, self.workspace, gradient, chunk, False)
        return gradient

    def sparse_hidden(self, lists: Any, *, cuda: bool = False) -> Any:
        from grpo_fast.kernels.sparse_rows import hidden_gradient

        operands = self.operands
        pairs = replace(operands.pairs, config=replace(operands.pairs.config, cuda_rows=cuda))
        return hidden_gradient(self.hidden, self.weight, self.targets, operands.row_scale, pairs, lists)

    def dense(self, need_hidden: bool, need_weight: bool) -> Any:
        from grpo_fast.kernels.dense import LogitGradient, dense_backward

        results = self.results
        return dense_backward(
            self.hidden,
            self.weight,
            self.targets,
            LogitGradient(
                logsumexp=results.logsumexp,
                mass=-self.g,
                target=-self.g * results.logprob.expm1(),
                entropy=None,
                entropy_gradient=None,
                mean=None,
            ),
            bias=None,
            inv_temperature=None,
            logit_scale=1.0,
            softcap=None,
            tile=self.plan.backward_tile,
            columns=self.plan.dense_columns,
            need_hidden=need_hidden,
            need_weight=need_weight,
            need_bias=False,
        )

    @property
    def product_flops(self) -> float:
        return 2.0 * self.rows * self.vocabulary * self.hidden.shape[1]

    @property
    def pair_flops(self) -> float:
        return 2.0 * self.pair_count * TILE * self.hidden.shape[1]

    @property
    def operand_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes

    @property
    def statistics_bytes(self) -> int:
        return 4 * self.tiles * self.rows


def _forward(inputs: KernelInputs) -> Prepared:
    first = inputs.first
    return _each(
        inputs,
        Batch.tile_statistics,
        Work(first.product_flops, first.operand_bytes + first.statistics_bytes),
    )


def _finalise(inputs: KernelInputs) -> Prepared:
    return _each(inputs, Batch.row_results, Work(bytes=inputs.first.statistics_bytes))


def _select(inputs: KernelInputs, *, cuda: bool) -> Prepared:
    if cuda:
        _require_library(inputs)
    return _each(inputs, lambda batch: batch.select(cuda=cuda), Work(bytes=inputs.first.statistics_bytes))


def _pairs(inputs: KernelInputs) -> Prepared:
    first = inputs.first
    workspace = first.pair_count * TILE * first.hidden.element_size()
    prepared = _each(inputs, Batch.pair_gradient, Work(first.pair_flops, first.operand_bytes + workspace))
    return _with_density(prepared, first)


def _sparse_weight(inputs: KernelInputs) -> Prepared:
    first = inputs.first
    for batch in inputs.batches:
        batch.pair_gradient()
    workspace = first.pair_count * TILE * first.hidden.element_size()
    return _each(inputs, Batch.sparse_weight, Work(first.pair_flops, first.operand_bytes + workspace))


def _sparse_hidden(inputs: KernelInputs, *, cuda: bool) -> Prepared:
    if cuda:
        _require_library(inputs)
    lists = {id(batch): batch.pair_gradient() for batch in inputs.batches}
    first = inputs.first
    entries, depth = int(lists[id(first)].used[0]), first.hidden.shape[1]
    read = min(entries, first.vocabulary) * depth * first.hidden.element_size()
    prepared = _each(
        inputs,
        lambda batch: batch.sparse_hidden(lists[id(batch)], cuda=cuda),
        Work(2.0 * entries * depth, read + first.hidden.nbytes + 8 * entries),
    )
    return _with_density(prepared, first, entries_per_row=entries / first.rows)


def _require_library(inputs: KernelInputs) -> None:
    from grpo_fast.head import cuda

    if not cuda.available():
        raise Unsupported("csrc/ was not built: install with nvcc on the path")
    if inputs.first.hidden.dtype == torch.float32:
        raise Unsupported("csrc/ takes bfloat16 and float16")


def _dense(inputs: KernelInputs, *, need_hidden: bool = False, need_weight: bool = False) -> Prepared:
    first = inputs.first
    results = first.hidden.nbytes * need_hidden + first.weight.nbytes * need_weight
    work = Work((1 + need_hidden + need_weight) * first.product_flops, first.operand_bytes + results)
    return _each(inputs, lambda batch: batch.dense(need_hidden, need_weight), work)


def _torch_forward(inputs: KernelInputs, *, jacobian: bool) -> Prepared:
    first = inputs.first

    def run(batch: Batch) -> Any:
        return reference.forward(batch.problem, Request(), batch.plan.chunks, jacobian=jacobian)

    return _each(inputs, run, Work((1 + jacobian) * first.product_flops, first.operand_bytes))


def _torch_backward(inputs: KernelInputs, *, need_hidden: bool, need_weight: bool) -> Prepared:
    first = inputs.first
    statistics = {
        id(batch): reference.forward(batch.problem, Request(), batch.plan.chunks)[0]
        for batch in inputs.batches
    }

    def run(batch: Batch) -> Any:
        return reference.backward(
            batch.problem,
            statistics[id(batch)],
            RowGradients(batch.g, None, None, None),
            batch.plan.chunks,
            jacobian=None,
            need_hidden=need_hidden,
            need_weight=need_weight,
            need_bias=False,
        )

    results = first.hidden.nbytes * need_hidden + first.weight.nbytes * need_weight
    work = Work((1 + need_hidden + need_weight) * first.product_flops, first.operand_bytes + results)
    return _each(inputs, run, work)


def _each(inputs: KernelInputs, call: Callable[[Batch], Any], work: Work) -> Prepared:
    """A batch a repetition. Each has had its turn before, so that nothing it rests on is made while timed."""
    batches = inputs.rotate()
    with torch.no_grad():
        for batch in inputs.batches:
            call(batch)

    def run(_: object) -> None:
        with torch.no_grad():
            call(next(batches))

    return Prepared(run, work)


def _with_density(prepared: Prepared, batch: Batch, **more: float) -> Prepared:
    density = batch.pair_count / (batch.rows * batch.tiles)
    return Prepared(prepared.run, prepared.work, lambda _: {"density": density} | more)


_CASES: dict[str, Callable[[KernelInputs], Prepared]] = {
    FORWARD: _forward,
    FINALISE: _finalise,
    SELECT: partial(_select, cuda=False),
    SELECT_CUDA: partial(_select, cuda=True),
    PAIRS: _pairs,
    SPARSE_WEIGHT: _sparse_weight,
    SPARSE_HIDDEN: partial(_sparse_hidden, cuda=False),
    SPARSE_HIDDEN_CUDA: partial(_sparse_hidden, cuda=True),
    DENSE: _dense,
    DENSE_HIDDEN: partial(_dense, need_hidden=True),
    DENSE_BOTH: partial(_dense, need_hidden=True, need_weight=True),
    TORCH_FORWARD: partial(_torch_forward, jacobian=False),
    TORCH_JACOBIAN: partial(_torch_forward, jacobian=True),
    TORCH_HIDDEN: partial(_torch_backward, need_hidden=True, need_weight=False),
    TORCH_WEIGHT: partial(_torch_backward, need_hidden=False, need_weight=True),
    TORCH_BOTH: partial(_torch_backward, need_hidden=True, need_weight=True),
}
