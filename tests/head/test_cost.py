"""Launches, memory, host reads and copies of the head, traced on meta tensors, which hold no values."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_fast import GRPOLossConfig, LossInputs, StepTotals
from grpo_fast.objective import policy_loss
from grpo_fast.objective.catalog import CATALOG

pytest.importorskip("triton")
from tests.kernels.aot import head, step

READ, COPY = "read of the host", "copy from the host"
SIZES = ((896, 151_936), (2048, 151_936), (4096, 128_256))  # H, V
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Copies(TorchFunctionMode):
    """Record calls that copy Python numbers to the device."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and result.is_meta:
            self.steps.append(COPY)
        return result


class Cost(TorchDispatchMode):
    """Record kernels, `aten` operations, host reads and copies in order, and the peak of new storages."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.alive: dict[int, int] = {}  # bytes of each storage
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self.alive:
                self.alive[key] = leaf.untyped_storage().nbytes()
                weakref.finalize(leaf.untyped_storage(), self.alive.pop, key)
        self.peak = max(self.peak, sum(self.alive.values()))
        if len({leaf.device for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}) > 1:
            self.steps.append(COPY)
        name = func._schema.name.split("::")[1]
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        is_empty = isinstance(result, Tensor) and not result.numel()
        if not (is_empty or is_view or name in _ALLOCATIONS):
            self.steps.append(f"aten.{name}")
        return result

    def read(self, value: Any) -> Any:
        self.steps.append(READ)
        return value


def cost_of(sizes: dict[str, int], **options: bool) -> Cost:
    """Trace a step on Hopper; the peak leaves inputs, statistics and gradients out."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *_, **__: cost.steps.append(kernel.fn.__name__)

    with (
        mock.patch.object(JITFunction, "__getitem__", launch),
        mock.patch.object(InterpretedFunction, "__getitem__", launch),
        Cost() as cost,
        Copies(cost.steps),
    ):
        own = step(head(**sizes), "sm_90", **options, ask=cost.read)
        cost.peak -= sum(tensor.nbytes for tensor in own)
    return cost


@pytest.mark.parametrize("weight", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_sparse_head_takes_300_mib_and_40_launches_and_reads_last(size, weight):
    found = cost_of({"depth": size[0], "vocabulary": size[1]}, weight=weight)

    assert 0 < found.peak <= 300 << 20
    assert "forward_kernel" in found.steps and len(found.steps) - found.steps.count(READ) <= 40
    assert found.steps.index(READ) == len(found.steps) - 1 and COPY not in found.steps


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"exact": True}, 1),
        ({"everything": True}, 1),
        ({"everything": True, "keep": True}, 1),
        ({"exact": True, "keep": True}, 0),
        ({"exact": True, "weight": False}, 0),
    ],
    ids=str,
)
def test_an_exact_step_reads_once_at_most_after_the_forward_and_copies_nothing(options, reads):
    steps = cost_of({}, **options).steps

    assert steps.count(READ) == reads and COPY not in steps
    assert not reads or steps.index(READ) > steps.index("finalize_kernel")


@pytest.mark.parametrize("name", sorted({*CATALOG} - {"clip_cov", "kl_cov"}))  # which read a count
def test_a_loss_in_torch_copies_no_number_from_the_host(name):
    row, ids = (torch.empty(12, dtype=dtype, device="meta") for dtype in (torch.float32, torch.int64))
    given = dict.fromkeys(("old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy"), row)
    given |= {"group_ids": ids, "totals": StepTotals(12, 3)}
    inputs = LossInputs(row.clone().requires_grad_(), row, ids, ids >= 0, 3, **given)

    with Cost() as cost, Copies(cost.steps):
        policy_loss(inputs, GRPOLossConfig(name, max_completion_length=4)).loss.backward()

    assert "aten.sum" in cost.steps and COPY not in cost.steps
