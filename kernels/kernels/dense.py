"""The exact backward: logits recomputed a chunk of the vocabulary at a time, then two cuBLAS products.

For each chunk one kernel recomputes the logits, forms G = dL/d(x·w) in float32 registers and rounds it once
to the inputs' dtype. Then dX += G W_chunk in float32, and dW_chunk = Gᵀ X is written once. The workspace is
one chunk of G. `exponentials` saves the recomputation at the price of N·V elements.

In float16, whose range is too small for upstream gradients of 1/N, G is divided by a power of two near its
largest entry before rounding, and the products are multiplied back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ProductTile
from .product import (
    LOG2E,
    is_target,
    product_arguments,
    program_count,
    tile_position,
    tile_products,
    transform_logits,
    untransform_gradient,
)

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, LogitGradient, Wanted


def row_aligned(rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate (rows, columns) whose rows begin on 32 bytes."""
    return like.new_empty((rows, -(-columns // 16) * 16), dtype=dtype or like.dtype)[:, :columns]


# `width` is specialized: for a number that need not be a multiple of 16, a thread stores two bytes at a time.
@triton.jit(do_not_specialize=["rows", "vocabulary", "programs"])
def logit_gradient_kernel(
    hidden,  # (N, H): see tile_products
    weight,  # (V, H)
    transform,  # `Transform`
    targets,  # (N,) int64
    coefficients,  # `LogitGradient`, (N,) float32 each
    inv_scale,  # () float32 or None: factor of G
    gradient_out,  # (N, width): dL/d(x·w + bias)·inv_scale of columns [start, start + width)
    rows,
    start,  # a multiple of COLUMNS
    width,  # a multiple of 16: columns past the vocabulary hold anything
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    gradient_stride,
    programs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.assume(hidden_size > 0)
    row_blocks = tl.cdiv(rows, ROWS)
    column_blocks = tl.cdiv(width, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, programs, flatten=DESCRIPTORS):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        first_row = row_block * ROWS
        first_column = start + column_block * COLUMNS
        products = tile_products(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, rows, vocabulary,
            hidden_size, ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_DEPTH, PRECISION,
        )  # fmt: skip
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        live = row < rows
        z = transform_logits(products, transform, row, column, rows, vocabulary)

        logsumexp = tl.load(coefficients.logsumexp + row, mask=live, other=0.0)
        mass = tl.load(coefficients.mass + row, mask=live, other=0.0)
        p = tl.exp2(tl.fma(z, LOG2E, (-logsumexp * LOG2E)[:, None]))
        if coefficients.entropy is not None:
            entropy = tl.load(coefficients.entropy + row, mask=live, other=0.0)
            upstream = tl.load(coefficients.entropy_gradient + row, mask=live, other=0.0)
            surprise = upstream[:, None] * (z + (entropy - logsumexp)[:, None])
            gradient = tl.where(p > 0, p * (mass[:, None] - surprise), 0.0)
        else:
            gradient = p * mass[:, None]
        offset = tl.arange(0, COLUMNS)
        target = (tl.load(targets + row, mask=live, other=-1) - first_column).to(tl.int32)
        at_target = tl.load(coefficients.target + row, mask=live, other=0.0)
        gradient = tl.where(is_target(target, COLUMNS), at_target[:, None], gradient)
        if coefficients.mean is not None:
            gradient += tl.load(coefficients.mean + row, mask=live, other=0.0)[:, None]
        gradient = untransform_gradient(gradient, products, transform, row, column, rows, vocabulary)
        # One 64-bit address per row, 32-bit steps within it: a tile of 64-bit addresses would spill.
        line = gradient_out + (first_column - start) + row.to(tl.int64) * gradient_stride
        kept = live[:, None] & (offset < start + width - first_column)[None, :]
        if inv_scale is not None:
            gradient *= tl.load(inv_scale)
        tl.store(line[:, None] + offset[None, :], gradient.to(gradient_out.dtype.element_ty), mask=kept)


def dense_backward(
    call: HeadCall,
    rows: LogitGradient,
    wanted: Wanted,
    *,
    tile: ProductTile,
    columns: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute exact gradients over all N rows: float32 dX, dW and dbias; None where not wanted.

    Args:
        call: its operands have unit stride along H.
        columns: vocabulary entries per chunk; a multiple of `tile.columns`, or at least V.
    """
    programs = program_count(call.hidden.device)

    def fill(gradient: Tensor, start: int, width: int, inv_scale: Tensor | None) -> None:
        logit_gradient_kernel[(programs,)](
            **product_arguments(call, tile), targets=call.targets, coefficients=rows, inv_scale=inv_scale,
            gradient_out=gradient, rows=call.hidden.shape[0], start=start, width=width, programs=programs,
            gradient_stride=gradient.stride(0),
        )  # fmt: skip

    return dense_gradients(call, rows.coefficients, wanted, fill, columns=columns)


def dense_gradients(
    call: HeadCall,
    coefficients: list[Tensor],
    wanted: Wanted,
    fill: Callable[[Tensor, int, int, Tensor | None], None],
    *,
    columns: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Contract logit gradients, a chunk of the vocabulary at a time, into dX, dW and dbias.

    Args:
        coefficients: (N,) each, of the logit gradients.
        fill: writes a chunk (gradient, start, width, inv_scale), whose width is a multiple of 16, times the
            inverse scale.
    """
    hidden, weight, vocabulary = call.hidden, call.weight, call.vocabulary
    count = hidden.shape[0]
    of_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if wanted.hidden else None
    of_weight, of_bias = wanted.into_weight, None
    new = torch.empty_like if count else torch.zeros_like
    if wanted.weight and of_weight is None:
        of_weight = new(weight, memory_format=torch.contiguous_format)
    if wanted.bias:
        of_bias = new(call.bias)
    if count == 0:
        return of_hidden, of_weight, of_bias
    scale = float16_scale(call, coefficients)
    inv_scale = None if scale is None else scale.reciprocal()
    workspace = row_aligned(count, min(columns, vocabulary), hidden)
    for start in range(0, vocabulary, columns):
        part = slice(start, min(start + columns, vocabulary))
        gradient = workspace[:, : part.stop - start]
        fill(gradient, start, -(-gradient.shape[1] // 16) * 16, inv_scale)
        if of_hidden is not None:
            _accumulate(of_hidden, gradient, weight[part])
        if wanted.weight:
            add = wanted.into_weight is not None
            if add or scale is not None or of_weight.dtype != hidden.dtype:
                put(of_weight[part], product(gradient.t(), hidden), scale, add=add)
            else:
                torch.mm(gradient.t(), hidden, out=of_weight[part])
        if wanted.bias:
            put(of_bias[part], gradient.sum(0, dtype=torch.float32), scale, add=False)
    if of_hidden is not None and scale is not None:
        of_hidden *= scale
    return of_hidden, of_weight, of_bias


def float16_scale(call: HeadCall, coefficients: list[Tensor]) -> Tensor | None:
    """Return () float32, a power of two at or above the largest coefficient, or one; None unless float16."""
    if call.hidden.dtype != torch.float16:
        return None
    magnitude = torch.stack(coefficients).abs().amax(0) * call.logit_scale
    if call.inv_temperature is not None:
        magnitude = magnitude * call.inv_temperature
    largest = magnitude.amax()
    usable = (largest > 0) & largest.isfinite()
    return torch.where(usable, largest.log2().ceil().clamp(min=-100).exp2(), torch.ones_like(largest))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left @ right in float32."""
    if left.is_cuda and left.dtype != torch.float32 and _MULTIPLIES_INTO_FLOAT32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right in float32, in place."""
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    if total.is_cuda and _ADDS_IN_FLOAT32:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(product(left, right))


_MULTIPLIES_INTO_FLOAT32 = not torch.version.hip or torch.__version__ >= (2, 10)
"""Whether `torch.mm` takes `out_dtype`; ROCm's torch 2.9 refuses it (pytorch#162600)."""

_ADDS_IN_FLOAT32 = torch.__version__ >= (2, 10)
"""Whether `torch.addmm` takes `out_dtype`; torch 2.9 refuses it (pytorch#167931)."""


def put(destination: Tensor, part: Tensor, scale: Tensor | None, *, add: bool) -> None:
    """Write or add scale·part, rounded once to the destination's dtype; `part` may be overwritten."""
    if scale is not None:
        part *= scale
    if add:
        destination += part
    else:
        destination.copy_(part)
