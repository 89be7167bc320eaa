"""The launches that `benchmarks.aot` compiles: what the head calls, on meta tensors of a real shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_fast.head.tuning import SHARED_MEMORY

from .aot_losses import policy_loss_cases


@dataclass(frozen=True)
class Batch:
    """Meta tensors of one head. `depth` not a multiple of 8 has rows that no tensor descriptor can take."""

    dtype: torch.dtype = torch.bfloat16
    rows: int = 16_384
    depth: int = 2048
    vocabulary: int = 151_936
    bias: bool = False
    temperature: bool = False
    softcap: float | None = None

    def matrix(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype or self.dtype, device="meta")

    def vector(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.rows, dtype=dtype, device="meta")

    @property
    def transform(self) -> dict[str, object]:
        return {
            "bias": self.matrix(self.vocabulary, 1)[:, 0].contiguous() if self.bias else None,
            "inv_temperature": self.vector() if self.temperature else None,
            "logit_scale": 1.0,
            "softcap": self.softcap,
        }

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = self.matrix(self.rows, self.depth), self.matrix(self.vocabulary, self.depth)
        return hidden, weight, self.vector(torch.int64)


BATCHES = {
    "bfloat16": Batch(),
    "float16": Batch(dtype=torch.float16),
    "float32": Batch(dtype=torch.float32),
    "H=1000": Batch(depth=1000),
    "H=2044": Batch(depth=2044),
    "H=4096 V=128256": Batch(depth=4096, vocabulary=128_256),
    "H=7168 V=129280": Batch(depth=7168, vocabulary=129_280),
    "H=640 V=262144 softcap": Batch(depth=640, vocabulary=262_144, softcap=30.0),
    "V=50257": Batch(depth=768, vocabulary=50_257),
    "temperature": Batch(temperature=True),
    "bias, temperature": Batch(bias=True, temperature=True),
    "bias, temperature, softcap": Batch(bias=True, temperature=True, softcap=30.0),
    "float32, bias, temperature, softcap": Batch(
        dtype=torch.float32, bias=True, temperature=True, softcap=30.0
    ),
    "H=2044, bias, temperature, softcap": Batch(depth=2044, bias=True, temperature=True, softcap=30.0),
}
"""What changes the machine code: dtypes, alignment, vocabulary edges, the way from a product to a logit."""


def shipped_cases(capability: int) -> dict[str, Callable[[], None]]:
    """Name of the case to the call that launches its kernels."""
    cases: dict[str, Callable[[], None]] = {}
    for name, batch in BATCHES.items():
        cases[f"forward, {name}"] = partial(_forward, batch, capability)
        cases[f"sparse, {name}"] = partial(_sparse_backward, batch, capability, want_bias=batch.bias)
        cases[f"dense, {name}"] = partial(_dense_backward, batch, capability)
        if batch.softcap is None:
            cases[f"forward that keeps, {name}"] = partial(_forward, batch, capability, keep=True)
            cases[f"dense from what was kept, {name}"] = partial(
                _dense_backward, batch, capability, keep=True
            )
    cases["forward that keeps, with all statistics"] = partial(
        _forward, Batch(), capability, everything=True, keep=True
    )
    for name in ("bfloat16", "bias, temperature, softcap"):
        batch = BATCHES[name]
        cases[f"forward with all statistics, {name}"] = partial(_forward, batch, capability, everything=True)
        cases[f"dense of entropy and mean, {name}"] = partial(
            _dense_backward, batch, capability, everything=True
        )
        cases[f"sparse with a frozen head, {name}"] = partial(
            _sparse_backward, batch, capability, want_weight=False
        )
        cases[f"sparse with a frozen body, {name}"] = partial(
            _sparse_backward, batch, capability, want_hidden=False
        )
    cases["sparse into a float32 gradient"] = partial(_sparse_backward, Batch(), capability, accumulate=True)
    return cases | policy_loss_cases()


def _plan(
    batch: Batch, capability: int, *, everything: bool = False, keep: bool = False, trainable: bool = True
):
    from grpo_fast.head.plan import Device, Workload, plan_head

    device = Device("cuda", divmod(capability, 10), SHARED_MEMORY[capability], has_triton=True)
    work = Workload(
        rows=batch.rows,
        vocabulary=batch.vocabulary,
        dtype=batch.dtype,
        softcap=batch.softcap is not None,
        extra_statistics=everything,
        dense_gradient=everything,
        aligned=batch.depth * batch.dtype.itemsize % 16 == 0,
        hidden_size=batch.depth,
        trainable=trainable,
        keep=keep,
    )
    return plan_head(device, work)


def _forward(batch: Batch, capability: int, *, everything: bool = False, keep: bool = False) -> None:
    from grpo_fast.kernels.forward import Wanted, row_results, tile_statistics
    from grpo_fast.kernels.kept import allocate

    targets, count = batch.vector(torch.int64), torch.empty((), dtype=torch.int32, device="meta")
    tiles = tile_statistics(
        *batch.operands,
        count,
        **batch.transform,
        wanted=Wanted(everything, everything, everything or keep, everything),
        tile=_plan(batch, capability, everything=everything, keep=keep).forward_tile,
        keep=allocate(batch.rows, batch.vocabulary, batch.operands[0]) if keep else None,
    )
    row_results(tiles, targets, batch.vector(torch.int64), count, batch.vocabulary)


def _dense_backward(batch: Batch, capability: int, *, everything: bool = False, keep: bool = False) -> None:
    from grpo_fast.kernels import TILE
    from grpo_fast.kernels.dense import LogitGradient, dense_backward
    from grpo_fast.kernels.kept import Kept, allocate

    plan = _plan(batch, capability, everything=everything)
    optional = batch.vector() if everything else None
    dense_backward(
        *batch.operands,
        LogitGradient(batch.vector(), batch.vector(), batch.vector(), optional, optional, optional),
        **batch.transform,
        tile=plan.backward_tile,
        columns=plan.dense_columns,
        need_hidden=True,
        need_weight=True,
        need_bias=batch.bias,
        kept=Kept(
            allocate(batch.rows, batch.vocabulary, batch.operands[0]),
            batch.matrix(-(-batch.vocabulary // TILE), batch.rows, torch.float32),
        )
        if keep
        else None,
    )


def _sparse_backward(batch: Batch, capability: int, *, accumulate: bool = False, **wanted: bool) -> None:
    from grpo_fast.kernels import TILE
    from grpo_fast.kernels.select import select_pairs
    from grpo_fast.kernels.sparse import sparse_backward

    hidden, weight, targets = batch.operands
    pairs = select_pairs(
        batch.matrix(-(-batch.vocabulary // TILE), batch.rows, torch.float32),
        batch.vector(),
        targets,
        batch.vector(),
        batch.vector(),
        vocabulary=batch.vocabulary,
        tolerance=1.0,
        itemsize=batch.dtype.itemsize,
        config=_plan(batch, capability, trainable=wanted.get("want_weight", True)).sparse,
    )
    gradient = batch.matrix(batch.vocabulary, batch.depth, torch.float32) if accumulate else None
    sparse_backward(
        hidden, weight, targets, batch.vector(), pairs, **batch.transform, weight_gradient=gradient, **wanted
    )
