"""The exact backward: logits recomputed a chunk of the vocabulary at a time, then two cuBLAS products.

For each chunk one kernel recomputes the logits, forms dL/d(x·w) in float32 registers and rounds it once to
the inputs' dtype; then dX += G W_chunk in float32, and dW_chunk = Gᵀ X is finished and written once. The
workspace is one chunk of G whatever N and V are.

N·V elements of memory buy the recomputation: the forward keeps e = exp(z − the mass tile's largest logit) in
the operands' dtype, so that every entry has all of its digits whatever the row looks like, and
p = e·exp(largest − log-sum-exp). Forming the gradient within the forward, a chunk of rows at a time, would
need less, but adds every chunk to dW's float32 sums: 92 GB of traffic at N = 16,384, H = 2048, V = 151,936,
which takes longer than the product that it saves; rejected by that count, not measured.

G is divided by a power of two near its largest entry before rounding and the products are multiplied back:
float16 has no exponents for upstream gradients of 1/N, and a power of two costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import TILE, ProductTile
from .product import (
    LOG2E,
    product_arguments,
    program_count,
    tile_position,
    tile_products,
    transform_logits,
    untransform_gradient,
)

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem, LogitGradient, Wanted


class Kept(NamedTuple):
    """What the forward kept. Undefined past the rows in use."""

    exponentials: Tensor  # (N, V) in the operands' dtype, rows begin on 32 bytes
    maximum: Tensor  # (N, T) float32


def row_aligned(rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(rows, columns), not filled, whose rows begin on 32 bytes whatever the dtype."""
    return like.new_empty((rows, -(-columns // 16) * 16), dtype=dtype or like.dtype)[:, :columns]


# `width` is specialised: where it may be no multiple of 16, stores move two bytes a thread.
@triton.jit(do_not_specialize=["rows", "vocabulary", "programs"])
def logit_gradient_kernel(
    hidden,  # (N, H): see tile_products
    weight,  # (V, H)
    bias,  # (V,)
    inv_temperature,  # (N,) float32
    targets,  # (N,) int64
    logsumexp_in,  # (N,) float32, as the next five
    mass_in,
    target_in,
    entropy_in,  # or None, with its gradient
    entropy_gradient_in,
    mean_in,  # or None
    inv_scale,  # () float32: factor of G
    gradient_out,  # (N, width): dL/d(x·w + bias)·inv_scale of columns [start, start + width)
    rows,
    start,  # a multiple of COLUMNS
    width,
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    gradient_stride,
    logit_scale,
    softcap,
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
    factor = tl.load(inv_scale)
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
        z = transform_logits(
            products, bias, inv_temperature, logit_scale, softcap, row, column, rows, vocabulary
        )

        logsumexp = tl.load(logsumexp_in + row, mask=live, other=0.0)
        mass = tl.load(mass_in + row, mask=live, other=0.0)
        p = tl.exp2(tl.fma(z, LOG2E, (-logsumexp * LOG2E)[:, None]))
        if entropy_in is not None:
            entropy = tl.load(entropy_in + row, mask=live, other=0.0)
            upstream = tl.load(entropy_gradient_in + row, mask=live, other=0.0)
            surprise = upstream[:, None] * (z + (entropy - logsumexp)[:, None])
            gradient = tl.where(p > 0, p * (mass[:, None] - surprise), 0.0)
        else:
            gradient = p * mass[:, None]
        offset = tl.arange(0, COLUMNS)
        target = (tl.load(targets + row, mask=live, other=-1) - first_column).to(tl.int32)
        at_target = tl.load(target_in + row, mask=live, other=0.0)
        gradient = tl.where(offset[None, :] == target[:, None], at_target[:, None], gradient)
        if mean_in is not None:
            gradient += tl.load(mean_in + row, mask=live, other=0.0)[:, None]
        gradient = untransform_gradient(
            gradient, products, bias, inv_temperature, logit_scale, softcap, row, column, rows, vocabulary
        )
        # One 64-bit address per row, 32-bit steps within it: a tile of 64-bit addresses would spill.
        line = gradient_out + row.to(tl.int64) * gradient_stride
        kept = live[:, None] & (column < start + width)[None, :]
        tl.store(
            line[:, None] + (column - start)[None, :],
            (gradient * factor).to(gradient_out.dtype.element_ty),
            mask=kept,
        )


# `start` and `width` are specialised: where they may be no multiple of 16, threads move two bytes at a time.
@triton.jit(do_not_specialize=["rows"])
def kept_gradient_kernel(
    exponentials,  # (N, V)
    maximum,  # (N, T) float32
    targets,  # (N,) int64
    logsumexp_in,  # (N,) float32, as the next three
    mass_in,
    target_in,
    inv_temperature,  # or None
    inv_scale,  # () float32
    gradient_out,  # (N, width), written
    rows,
    start,
    width,
    tile_stride,
    kept_stride,
    gradient_stride,
    logit_scale,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = row < rows
    mass_tile = (start // TILE + tl.program_id(1)).to(tl.int64)
    largest = tl.load(maximum + row.to(tl.int64) * tile_stride + mass_tile, mask=live, other=0.0)
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
    if inv_temperature is not None:
        gradient *= tl.load(inv_temperature + row, mask=live, other=0.0)[:, None]
    gradient = (gradient * slope).to(gradient_out.dtype.element_ty)
    tl.store(gradient_out + line * gradient_stride + column[None, :], gradient, mask=inside)


def dense_backward(
    problem: HeadProblem,
    rows: LogitGradient,
    wanted: Wanted,
    *,
    tile: ProductTile,
    columns: int,
    kept: Kept | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Exact gradients of N rows, all of which take part: float32 dX, dW and dbias; None where not wanted.

    Args:
        problem: its operands have unit stride along H.
        columns: vocabulary entries per chunk; a multiple of `tile.columns`, or at least V.
        kept: what the forward kept of these rows, in place of recomputing it. Not with a softcap, nor with
            gradients of the entropy or the mean; rows without a gradient must have finite hidden states.
    """
    hidden, weight, vocabulary = problem.hidden, problem.weight, problem.vocabulary
    count = hidden.shape[0]
    of_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if wanted.hidden else None
    of_weight, of_bias = wanted.into_weight, wanted.into_bias
    new = torch.empty_like if count else torch.zeros_like
    if wanted.weight and of_weight is None:
        of_weight = new(weight, memory_format=torch.contiguous_format)
    if wanted.bias and of_bias is None:
        of_bias = new(problem.bias)
    if count == 0:
        return of_hidden, of_weight, of_bias
    scale = _power_of_two_scale(problem, rows)
    workspace = row_aligned(count, min(columns, vocabulary), hidden)
    for start in range(0, vocabulary, columns):
        part = slice(start, min(start + columns, vocabulary))
        gradient = workspace[:, : part.stop - start]
        if kept is None:
            _logit_gradient(problem, rows, tile, scale.reciprocal(), gradient, start)
        else:
            kept_gradient(problem, rows, kept, scale.reciprocal(), gradient, start)
        if of_hidden is not None:
            _accumulate(of_hidden, gradient, weight[part])
        if wanted.weight:
            product = _product(gradient.t(), hidden)
            _put(of_weight[part], product, scale, add=wanted.into_weight is not None)
        if wanted.bias:
            total = gradient.sum(0, dtype=torch.float32)
            _put(of_bias[part], total, scale, add=wanted.into_bias is not None)
    return None if of_hidden is None else of_hidden.mul_(scale), of_weight, of_bias


def _logit_gradient(
    problem: HeadProblem, rows: LogitGradient, tile: ProductTile, inv_scale: Tensor, out: Tensor, start: int
) -> None:
    """Fills `out`, (N, width), with dL/d(x·w + bias)·inv_scale of the columns from `start` on."""
    programs = program_count(problem.hidden.device)
    logit_gradient_kernel[(programs,)](
        **product_arguments(problem, tile),
        targets=problem.targets, logsumexp_in=rows.logsumexp, mass_in=rows.mass, target_in=rows.target,
        entropy_in=rows.entropy, entropy_gradient_in=rows.entropy_gradient, mean_in=rows.mean,
        inv_scale=inv_scale, gradient_out=out, rows=problem.targets.numel(), start=start,
        width=out.shape[1], gradient_stride=out.stride(0), programs=programs,
    )  # fmt: skip


def kept_gradient(
    problem: HeadProblem, rows: LogitGradient, kept: Kept, inv_scale: Tensor, out: Tensor, start: int
) -> None:
    """The same from what was kept; a row where `mass` is zero gets zeros. `start`: a multiple of `TILE`."""
    count, width = out.shape
    kept_gradient_kernel[(triton.cdiv(count, _KEPT_ROWS), triton.cdiv(width, TILE))](
        *kept, problem.targets, *rows[:3], problem.inv_temperature, inv_scale, out, count, start, width,
        kept.maximum.stride(0), kept.exponentials.stride(0), out.stride(0), float(problem.logit_scale),
        TILE=TILE, ROWS=_KEPT_ROWS, num_warps=4,
    )  # fmt: skip


_KEPT_ROWS = 32


def _power_of_two_scale(problem: HeadProblem, rows: LogitGradient) -> Tensor:
    """() float32 power of two at or above the largest coefficient; one when all are zero."""
    coefficients = [rows.mass, rows.target]
    coefficients += [c for c in (rows.entropy_gradient, rows.mean) if c is not None]
    magnitude = torch.stack(coefficients).abs().amax(0) * problem.logit_scale
    if problem.inv_temperature is not None:
        magnitude = magnitude * problem.inv_temperature
    largest = magnitude.amax()
    usable = (largest > 0) & largest.isfinite()
    return torch.where(usable, largest.log2().ceil().clamp(min=-100).exp2(), torch.ones_like(largest))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total += left @ right in float32, in place."""
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    if total.is_cuda and _ADDS_IN_FLOAT32:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(_product(left, right))


_ADDS_IN_FLOAT32 = torch.__version__ >= (2, 10)
"""Whether `torch.addmm` adds half precision products to float32; torch 2.9 refuses (pytorch#167931)."""


def _put(destination: Tensor, part: Tensor, scale: Tensor, *, add: bool) -> None:
    """Rounds scale·part to the destination's dtype once, sum included; `part` may be spoilt."""
    if add:
        destination.add_(part.mul_(scale))
    else:
        torch.mul(part, scale, out=destination)
