"""What one forward and backward of the head costs besides its products: launches, operations and memory.

Nothing is run: the head's own host code works on meta tensors of a real size, kernels are noted in place of
being launched, and every storage is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from grpo_fast.kernels import TILE
from torch import Tensor, nn

from grpo_fast.head.problem import Request, RowGradients, Wanted
from grpo_fast.plan.trace import Recorder

from .aot import Batch

SIZES = ((896, 151_936), (2048, 151_936), (4096, 128_256))  # H, V
CASES: dict[str, dict[str, bool]] = {
    "certified": {},
    "certified, frozen head": {"trainable": False},
    "exact": {"exact": True},
    "exact, frozen head": {"exact": True, "trainable": False},
}
DENSITY = 0.018
"""Live pairs of all, as rows of Qwen2.5-Coder-1.5B have them at tolerance 1."""

HOST = "read of the host"
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class HeadCost(Recorder):
    """Follows storages other than the inputs', and notes what the device is given.

    `steps`: in order, names of kernels, `aten.` operations without views and allocations, and `HOST`.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__(nn.Module())
        self.steps: list[str] = []
        self.peak = 0  # bytes
        for tensor in inputs:
            self._note(tensor, is_sum=False)
        self.events.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[1]
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        is_empty = isinstance(result, Tensor) and not result.numel()
        if not (is_empty or is_view or name in _ALLOCATIONS):
            self.steps.append(f"aten.{name}")
        return result

    @property
    def operations(self) -> int:
        return sum(step.startswith("aten.") for step in self.steps)

    @property
    def launches(self) -> int:
        return len(self.steps) - self.operations - self.steps.count(HOST)

    def ask(self, answer: Any) -> Any:
        self.steps.append(HOST)
        return answer


def head_cost(batch: Batch, capability: int = 90, *, exact: bool = False, trainable: bool = True) -> HeadCost:
    """Of a batch with a gradient in every row; `peak` is beyond inputs, statistics and gradients."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from grpo_fast.head import accelerated

    pairs = round(DENSITY * batch.rows * -(-batch.vocabulary // TILE))

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: cost.steps.append(kernel.fn.__name__)

    problem, gradient = batch.problem, torch.empty(batch.rows, device="meta")
    plan = batch.plan(capability, tolerance=0.0 if exact else None, trainable=trainable)
    cost = HeadCost(problem.hidden, problem.weight, problem.targets, gradient)
    patches: list[tuple[Any, str, Any]] = [
        (JITFunction, "__getitem__", launch),
        (InterpretedFunction, "__getitem__", launch),
        (Tensor, "is_cuda", True),  # products take half precision
        (Tensor, "nonzero", lambda rows: cost.ask(torch.arange(len(rows), device="meta")[:, None])),
        (accelerated, "_capturing", lambda _: False),
        (accelerated, "_read_later", lambda _: lambda: cost.ask([pairs, 0])),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(cost)
        statistics, state = accelerated.forward(problem, Request(), plan)
        wanted = Wanted(hidden=True, weight=trainable, bias=False)
        found = accelerated.backward(problem, statistics, RowGradients(gradient), wanted, state, plan)[0]
    outputs = sum(each.nbytes for each in (*statistics, *found) if each is not None)
    cost.peak = int(np.cumsum([event.sign * event.bytes for event in cost.events]).max()) - outputs
    return cost


def table(capability: int) -> str:
    lines = ["| | launches | operations | MiB beyond the outputs |", "|---|---|---|---|"]
    for depth, vocabulary in SIZES:
        for case, options in CASES.items():
            found = head_cost(Batch(depth=depth, vocabulary=vocabulary), capability, **options)
            counts = f"{found.launches} | {found.operations} | {found.peak / 2**20:,.0f}"
            lines.append(f"| H={depth} V={vocabulary}, {case} | {counts} |")
    return "\n".join(lines)
