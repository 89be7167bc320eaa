"""One forward and backward of the head without a device: what it launches, does, asks and allocates.

The head's own host code works on meta tensors of a real shape. Who patches Triton decides what a launch is:
`aot.compile_only` compiles, `head_cost` notes it and follows every storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from grpo_fast.kernels import TILE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fast.head.call import HeadCall, RowGradients, Wanted
from grpo_fast.head.operator import scaled_jacobian
from grpo_fast.head.outputs import Certificate
from grpo_fast.head.plan import Device, HeadPlan, Workload, plan_head
from grpo_fast.head.tuning import SHARED_MEMORY

DENSITY = 0.0078
"""Kept pairs of all, as rows of Qwen2.5-Coder-1.5B have them at the default."""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of one head. `depth` not a multiple of 8 has rows that no tensor descriptor can take."""

    dtype: torch.dtype = torch.bfloat16
    rows: int = 16_384
    depth: int = 2048
    vocabulary: int = 151_936
    bias: bool = False
    temperature: bool = False
    softcap: float | None = None

    @property
    def problem(self) -> HeadCall:
        return HeadCall(
            meta(self.rows, self.depth, dtype=self.dtype),
            meta(self.vocabulary, self.depth, dtype=self.dtype),
            meta(self.rows, dtype=torch.int64),
            bias=meta(self.vocabulary, dtype=self.dtype) if self.bias else None,
            inv_temperature=meta(self.rows) if self.temperature else None,
            softcap=self.softcap,
        )

    def plan(self, architecture: str, **options: Any) -> HeadPlan:
        """What the head would decide on that architecture, given the rest of `Workload`."""
        gfx = architecture if architecture.startswith("gfx") else ""
        capability = (0, 0) if gfx else divmod(int(architecture[3:]), 10)
        device = Device("cuda", capability, SHARED_MEMORY[architecture], has_triton=True, gfx=gfx)
        work = Workload(
            self.rows,
            self.vocabulary,
            self.dtype,
            softcap=self.softcap is not None,
            aligned=self.depth * self.dtype.itemsize % 16 == 0,
            hidden_size=self.depth,
            **options,
        )
        return plan_head(device, work)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(
    batch: BatchSizes,
    architecture: str,
    *,
    exact: bool = False,
    everything: bool = False,
    keep: bool = False,
    accumulate: bool = False,
    hidden: bool = True,
    weight: bool = True,
    ask: Callable[[Any], Any] = lambda answer: answer,
) -> list[Tensor]:
    """A forward, and a backward with a gradient in every row; inputs, statistics and gradients of the head.

    Args:
        exact: tolerance 0.
        everything: with all statistics, and gradients of the entropy and the mean logit: exact, too.
        keep: the forward keeps what the backward takes up.
        accumulate: the weight's gradient is added to one in float32.
        hidden: which gradients are wanted; that of a bias is where the weight's is.
        ask: is called with what the host reads.
    """
    from grpo_fast.head import accelerated

    problem, row = batch.problem, meta(batch.rows)
    upstream = RowGradients(*(4 if everything else 1) * [row])
    into = meta(*problem.weight.shape) if accumulate else None
    wanted = Wanted(hidden, weight, batch.bias and weight, into)
    pairs = round(DENSITY * batch.rows * -(-batch.vocabulary // TILE))
    options: dict[str, Any] = {"tolerance": 0.0 if exact else None, "trainable": weight}
    jacobian = not (everything or weight)
    asked = dict.fromkeys(("entropy", "mean_logit", "max_logit", "log_sum_sq"), everything)
    plan = batch.plan(architecture, extra_statistics=4 * everything, keep=keep, jacobian=jacobian, **options)
    with (
        mock.patch.object(Tensor, "is_cuda", True),  # products take half precision
        mock.patch.object(Tensor, "nonzero", lambda rows: ask(meta(len(rows), 1, dtype=torch.int64))),
        mock.patch.object(accelerated, "_capturing", lambda _: False),
        mock.patch.object(accelerated, "_read_later", lambda _: lambda: ask(pairs)),
    ):
        statistics, state = accelerated.forward(problem._replace(**asked), plan)
        if plan.jacobian:
            gradients = scaled_jacobian(problem, upstream, state.jacobian)
        else:
            plan = batch.plan(architecture, entropy_gradient=everything, mean_gradient=everything, **options)
            pending = Certificate.pending(problem.hidden.device)
            gradients = accelerated.backward(problem, statistics, upstream, wanted, state, pending, plan)
    return [each for each in (*problem, row, *statistics, *gradients) if isinstance(each, Tensor)]


# What it costs besides its products -----------------------------------------------------------------------

HOST = "read of the host"
SIZES = ((896, 151_936), (2048, 151_936), (4096, 128_256))  # H, V
CASES: dict[str, dict[str, bool]] = {
    "sparse": {},
    "sparse, frozen head": {"weight": False},
    "exact": {"exact": True},
    "exact from what was kept": {"exact": True, "keep": True},
    "exact, frozen head": {"exact": True, "weight": False},
}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class HeadCost(TorchDispatchMode):
    """`steps`: in order, names of kernels, `aten.` operations without views and allocations, and `HOST`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.peak = self._live = 0  # bytes besides inputs; in the end statistics and gradients are left out
        self._alive: set[int] = set()  # storages that operators made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._alive:
                self._note(leaf.untyped_storage())
        name = func._schema.name.split("::")[1]
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        is_empty = isinstance(result, Tensor) and not result.numel()
        if not (is_empty or is_view or name in _ALLOCATIONS):
            self.steps.append(f"aten.{name}")
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._alive.add(storage._cdata)
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self._live -= size

    @property
    def operations(self) -> int:
        return sum(step.startswith("aten.") for step in self.steps)

    @property
    def launches(self) -> int:
        return len(self.steps) - self.operations - self.steps.count(HOST)

    def ask(self, answer: Any) -> Any:
        self.steps.append(HOST)
        return answer


def head_cost(batch: BatchSizes, architecture: str = "sm_90", **options: bool) -> HeadCost:
    """Of a `step` with these options."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: cost.steps.append(kernel.fn.__name__)

    with (
        mock.patch.object(JITFunction, "__getitem__", launch),
        mock.patch.object(InterpretedFunction, "__getitem__", launch),
        HeadCost() as cost,
    ):
        own = step(batch, architecture, **options, ask=cost.ask)
        cost.peak -= sum(tensor.nbytes for tensor in own)
    return cost


def table(architecture: str) -> str:
    heads = "launches", "operations", "reads of the host", "MiB beyond the outputs"
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for depth, vocabulary in SIZES:
        for case, options in CASES.items():
            found = head_cost(BatchSizes(depth=depth, vocabulary=vocabulary), architecture, **options)
            reads, peak = found.steps.count(HOST), found.peak / 2**20
            counts = f"{found.launches} | {found.operations} | {reads} | {peak:,.0f}"
            lines.append(f"| H={depth} V={vocabulary}, {case} | {counts} |")
    return "\n".join(lines)
