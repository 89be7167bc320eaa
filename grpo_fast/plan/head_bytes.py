"""What the head holds beside its operands and its gradients, from its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from grpo_fast.head.plan import Device, HeadPlan, Workload, plan_head
from grpo_fast.kernels import TILE

_STATISTICS = 3  # numbers a row that stay until the backward: log-probability, log-sum-exp, entropy
_ROW_SCRATCH = 12  # float32 numbers a row in flight during a backward: gradients, masks, scales
_CPU_CHUNKS = 3  # copies of a chunk of logits that the reference path holds: z, its exponentials, a product


@dataclass(frozen=True)
class HeadBytes:
    """Bytes by when they are allocated."""

    kept: int  # from the forward to the backward
    forward: int  # during the forward, the kept ones not among them
    backward: int  # during the backward


def head_bytes(device: Device, call: Workload, *, weight_grad: bool = False) -> HeadBytes:
    """Bytes of `linear_grpo_loss`, or of `linear_logprob`.

    The worst case counts: a batch with the most pairs that the sparse backward makes room for, or one so flat
    that it takes the dense path.

    Args:
        call: with `extra_statistics`, as training asks for the entropy as a metric.
        weight_grad: the weight's gradient is added to an existing float32 one.
    """
    plan = plan_head(device, replace(call, jacobian=not (call.trainable or call.entropy_gradient)))
    if plan.backend == "triton" and plan.jacobian:
        return _jacobian(call, plan)
    of_path = _triton if plan.backend == "triton" else _reference
    return of_path(call, plan, new_weight=call.trainable and not weight_grad)


def _jacobian(call: Workload, plan: HeadPlan) -> HeadBytes:
    """Of a frozen head's exact gradient by the kernels."""
    width, height = call.hidden_size, min(plan.jacobian_rows, call.rows)
    of_tiles = 4 * -(-call.vocabulary // (16 * TILE)) * 16
    again = width * call.dtype.itemsize + (1 + call.extra_statistics) * of_tiles  # of rows made a second time
    row = call.vocabulary * call.dtype.itemsize + of_tiles + again + 2 * 4 * width
    gradient = 4 * call.rows * width  # of the log-probability; the backward only scales it
    return HeadBytes(
        kept=gradient + 4 * _STATISTICS * call.rows,
        forward=height * row,
        backward=gradient + 4 * _ROW_SCRATCH * call.rows,
    )


def _triton(call: Workload, plan: HeadPlan, *, new_weight: bool) -> HeadBytes:
    rows, vocabulary, width, itemsize = call.rows, call.vocabulary, call.hidden_size, call.dtype.itemsize
    tiles = -(-vocabulary // TILE)
    of_tiles = 4 * rows * -(-tiles // 16) * 16  # a float32 number of every row and tile
    hidden = rows * width * itemsize  # the hidden states of the rows with work, or with a gradient
    columns = min(plan.dense_columns, vocabulary)
    dense = hidden + rows * columns * itemsize + 4 * rows * width
    if call.trainable and not (new_weight and plan.backward == "dense" and call.dtype != torch.float16):
        dense += 4 * columns * width  # a product in float32 that is added, or scaled
    sparse = 0
    if plan.backward == "sparse":
        pairs = plan.sparse.most_pairs(rows, tiles)
        sparse = plan.sparse.workspace_bytes(pairs, rows, tiles, itemsize)
    return HeadBytes(
        kept=of_tiles + 4 * _STATISTICS * rows,
        forward=hidden + of_tiles,  # the entropy of every tile
        backward=4 * _ROW_SCRATCH * rows + max(sparse, dense),
    )


def _reference(call: Workload, plan: HeadPlan, *, new_weight: bool) -> HeadBytes:
    rows, width, itemsize = call.rows, call.hidden_size, call.dtype.itemsize
    height, columns = min(plan.chunks.rows, rows), min(plan.chunks.columns, call.vocabulary)
    logits = 4 * height * columns
    weights = 4 * columns * width  # a chunk of the weight or of its gradient, in float32
    states = 4 * height * width
    converted = weights + states if itemsize < 4 else 0  # operands of a product of 16 bits, made float32
    gradient = 4 * rows * width  # of the hidden states, in float32
    if call.trainable:
        kept = block = products = 0
        backward = rows * width * itemsize + gradient + weights
        backward += logits * (_CPU_CHUNKS if call.entropy_gradient else 1)
        backward += max(converted, 2 * weights if itemsize < 4 and new_weight else 0)
    else:
        kept = backward = gradient  # of the log-probability; the backward only scales it
        block = states
        products = 2 * logits + (weights if itemsize < 4 else 0)
    return HeadBytes(
        kept=kept + 4 * _STATISTICS * rows,
        forward=max(logits + converted, _CPU_CHUNKS * logits, products) + block + height * width * itemsize,
        backward=backward + 4 * _ROW_SCRATCH * rows,
    )
