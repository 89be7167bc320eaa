"""What the head holds beside its operands and its gradients, from its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grpo_fast.head.plan import Device, HeadPlan, Workload, plan_head
from grpo_fast.kernels import TILE

_STATISTICS = 2  # log-probability and log-sum-exp of every row
_ROW_SCRATCH = 12  # float32 numbers a row that pass through a backward: gradients, masks, scales
_CPU_CHUNKS = 3  # copies of a chunk of logits that the reference path holds: z, its exponentials, a product


@dataclass(frozen=True)
class HeadBytes:
    """By when they are there."""

    kept: int  # from the forward to the backward
    forward: int  # during the forward, the kept ones not among them
    backward: int  # during the backward


def head_bytes(
    device: Device,
    *,
    rows: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    weight_trained: bool,
    softcap: bool = False,
    entropy_trained: bool = False,
    tolerance: float | None = None,
    weight_grad: bool = False,
    recompute: bool = True,
) -> HeadBytes:
    """Bytes of `linear_grpo_loss` over `rows` targets, with the entropy as a metric.

    The worst case counts: a batch too flat for the sparse backward overflows its lists and is done again
    densely, while the lists are still there.

    Args:
        entropy_trained: the loss has a term of the entropy.
        weight_grad: the weight's gradient is added to an existing float32 one.
        recompute: as in `linear_grpo_loss`.
    """
    work = Workload(
        rows,
        vocabulary,
        dtype,
        softcap=softcap,
        extra_statistics=True,
        dense_gradient=entropy_trained,
        tolerance=tolerance,
        keep=not recompute,
        hidden_size=hidden,
        trainable=weight_trained,
    )
    plan = plan_head(device, work)
    sizes = _Sizes(rows, hidden, vocabulary, dtype.itemsize, weight_trained, weight_grad)
    path = _triton if plan.path == "triton" else _reference
    return path(sizes, plan, entropy_trained)


@dataclass(frozen=True)
class _Sizes:
    rows: int
    hidden: int
    vocabulary: int
    itemsize: int
    weight_trained: bool
    weight_grad: bool

    @property
    def matrix(self) -> int:
        """Bytes of the hidden states once more, in their dtype."""
        return self.rows * self.hidden * self.itemsize

    @property
    def new_weight(self) -> int:
        """Bytes of a gradient of the weight, where one is made."""
        made = self.weight_trained and not self.weight_grad
        return self.vocabulary * self.hidden * self.itemsize if made else 0

    @property
    def kept_logits(self) -> int:
        """Bytes of a number in the inputs' dtype for every logit, rows begun on whole multiples of 16."""
        return self.rows * -(-self.vocabulary // 16) * 16 * self.itemsize

    def numbers(self, count: int) -> int:
        """Bytes of float32 numbers for every row."""
        return 4 * count * self.rows


def _triton(sizes: _Sizes, plan: HeadPlan, entropy_trained: bool) -> HeadBytes:
    tiles = -(-sizes.vocabulary // TILE)
    tile_numbers = sizes.numbers(tiles)
    columns = min(plan.dense_columns, sizes.vocabulary)
    dense = sizes.rows * columns * sizes.itemsize + sizes.numbers(sizes.hidden)
    if sizes.weight_trained:
        dense += 4 * columns * sizes.hidden
    takes_up = plan.keep and not entropy_trained  # what the forward kept, of all rows, where they are
    if not takes_up:
        dense += sizes.matrix
    sparse = 0
    if plan.backward == "sparse" and not takes_up:
        sparse = plan.sparse.workspace_bytes(
            sizes.rows, tiles, sizes.itemsize, hidden=True, weight=sizes.weight_trained
        )
        dense += sizes.matrix + sizes.new_weight
    return HeadBytes(
        kept=tile_numbers
        + sizes.numbers(_STATISTICS + 1)
        + 8 * sizes.rows
        + (sizes.kept_logits + tile_numbers if plan.keep else 0),
        forward=sizes.matrix + tile_numbers,  # rows in the order of the work, and the entropy of every tile
        backward=sizes.matrix + sizes.numbers(_ROW_SCRATCH) + max(sparse, dense),
    )


def _reference(sizes: _Sizes, plan: HeadPlan, entropy_trained: bool) -> HeadBytes:
    height, width = min(plan.chunks.rows, sizes.rows), min(plan.chunks.columns, sizes.vocabulary)
    logits = 4 * height * width
    chunk = 4 * width * sizes.hidden  # of the weight or its gradient, in float32
    narrow = sizes.itemsize < 4  # then operands of a product are converted first, and sums afterwards
    converted = chunk + 4 * height * sizes.hidden if narrow else 0
    gradient = sizes.numbers(sizes.hidden)  # of the hidden states, in float32
    if sizes.weight_trained:
        kept = block = products = 0
        backward = sizes.matrix + gradient + logits * (_CPU_CHUNKS if entropy_trained else 1) + chunk
        backward += max(converted, 2 * chunk if narrow and not sizes.weight_grad else 0)
    else:
        kept = backward = gradient  # of the log-probability; the backward only scales it
        block = 4 * height * sizes.hidden
        products = 2 * logits + (chunk if narrow else 0)
    return HeadBytes(
        kept=kept + sizes.numbers(_STATISTICS + 1),
        forward=max(logits + converted, _CPU_CHUNKS * logits, products)
        + block
        + height * sizes.hidden * sizes.itemsize,
        backward=backward + sizes.numbers(_ROW_SCRATCH),
    )
