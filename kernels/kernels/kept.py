"""The logit gradient from exponentials that the forward kept: three products for an exact gradient, not four.

The forward stores e = exp(z − the mass tile's largest logit) in the operands' dtype, so that every entry has
all of its digits whatever the row looks like; here  p = e·exp(largest − log-sum-exp)  makes it a probability,
and the gradient is formed in float32 and rounded once more. N·V elements of memory buy the recomputation.

Forming the gradient within the forward, a chunk of rows at a time, where the loss is known there, would need
less memory for logits, but adds every chunk to dW's float32 sums: 8·V·H bytes a chunk. Chunks of 440 rows
(256 MiB of logits) of 16,384 move 92 GB that way at H = 2048 and V = 151,936, which takes longer than the
product that it saves; rejected by that count, not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import TILE

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, LogitGradient


class Kept(NamedTuple):
    """What the forward kept. Undefined past the rows in use."""

    exponentials: Tensor  # (N, V) in the operands' dtype, rows begin on 32 bytes
    maximum: Tensor  # (T, N) float32


def allocate(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """(N, V) exponentials to be."""
    return like.new_empty((rows, -(-vocabulary // 16) * 16))[:, :vocabulary]


def kept_gradient(
    kept: Kept, problem: HeadProblem, of_rows: LogitGradient, inv_scale: Tensor, gradient: Tensor, start: int
) -> None:
    """Fills `gradient`, (N, width), with dL/d(x·w + bias)·inv_scale of the columns from `start` on.

    Args:
        of_rows: a row where `mass` is zero gets zeros; neither entropy nor mean.
        inv_scale: () float32.
        start: a multiple of `TILE`.
    """
    rows, width = gradient.shape
    inv_temperature = problem.inv_temperature
    kept_gradient_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(width, TILE))](
        *kept, problem.targets, *of_rows[:3], inv_temperature, inv_scale, gradient, rows, start, width,
        kept.maximum.shape[1], kept.exponentials.stride(0), gradient.stride(0), float(problem.logit_scale),
        HAS_TEMPERATURE=inv_temperature is not None, TILE=TILE, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip


_ROWS = 32


# `start` and `width` are specialised: where they may be no multiple of 16, threads move two bytes at a time.
@triton.jit(do_not_specialize=["rows", "capacity"])
def kept_gradient_kernel(
    exponentials,  # (N, V)
    maximum,  # (T, N) float32
    targets,  # (N,) int64
    logsumexp_in,  # (N,) float32, as the next three
    mass_in,
    target_in,
    inv_temperature,  # read when HAS_TEMPERATURE
    inv_scale,  # () float32
    gradient_out,  # (N, width), written
    rows,
    start,
    width,
    capacity,
    kept_stride,
    gradient_stride,
    logit_scale,
    HAS_TEMPERATURE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = row < rows
    mass_tile = (start // TILE + tl.program_id(1)).to(tl.int64)
    largest = tl.load(maximum + mass_tile * capacity + row, mask=live, other=0.0)
    mass = tl.load(mass_in + row, mask=live, other=0.0)
    share = tl.exp(largest - tl.load(logsumexp_in + row, mask=live, other=0.0)) * mass
    inside = live[:, None] & (column < width)[None, :]
    line = row.to(tl.int64)[:, None]
    e = tl.load(exponentials + line * kept_stride + (start + column)[None, :], mask=inside, other=0.0)
    gradient = tl.where((mass == 0.0)[:, None], 0.0, e.to(tl.float32) * share[:, None])
    target = tl.load(targets + row, mask=live, other=-1) - start
    at_target = tl.load(target_in + row, mask=live, other=0.0)
    gradient = tl.where(column[None, :] == target[:, None], at_target[:, None], gradient)
    slope = tl.load(inv_scale) * logit_scale
    if HAS_TEMPERATURE:
        gradient *= tl.load(inv_temperature + row, mask=live, other=0.0)[:, None]
    gradient = (gradient * slope).to(gradient_out.dtype.element_ty)
    tl.store(gradient_out + line * gradient_stride + column[None, :], gradient, mask=inside)
