"""The exact backward: logits recomputed a chunk of the vocabulary at a time, then two cuBLAS products.

For each chunk one kernel recomputes the logits, forms dL/d(x·w) in float32 registers and rounds it once to
the inputs' dtype; then dX += G W_chunk in float32, and dW_chunk = Gᵀ X is finished and written once. The
workspace is one chunk of G whatever N and V are.

G is divided by a power of two near its largest entry before rounding and the products are multiplied back:
float16 has no exponents for upstream gradients of 1/N, and a power of two costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ProductTile
from .kept import Kept, kept_gradient
from .product import (
    product_operands,
    product_options,
    program_count,
    tile_position,
    tile_product,
)
from .transform import LOG2E, transform_logits, untransform_gradient


@dataclass(frozen=True)
class LogitGradient:
    """What makes a row's logit gradient, (N,) float32 each, contiguous.

    dL/dz_v = p_v·(mass - entropy_gradient·(log p_v + entropy)) + mean, but `target` + mean at the target.
    """

    logsumexp: Tensor
    mass: Tensor  # g_logsumexp - g_logprob
    target: Tensor  # -g_logprob·expm1(log p) + ..., formed without cancellation
    entropy: Tensor | None  # nats; None: no gradient through the entropy
    entropy_gradient: Tensor | None
    mean: Tensor | None  # g_mean_logit / V


# `width` is specialised: where it may be no multiple of 16, stores move two bytes a thread.
@triton.jit(do_not_specialize=["rows", "vocabulary", "programs"])
def logit_gradient_kernel(
    hidden,  # (N, H): see tile_product
    weight,  # (V, H)
    bias,  # (V,)
    inv_temperature,  # (N,) float32
    targets,  # (N,) int64
    logsumexp_in,  # (N,) float32, as the next five
    mass_in,
    target_in,
    entropy_in,
    entropy_gradient_in,
    mean_in,
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
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_MEAN: tl.constexpr,
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
        z = tile_product(
            hidden,
            weight,
            hidden_stride,
            weight_stride,
            first_row,
            first_column,
            rows,
            vocabulary,
            hidden_size,
            ROWS,
            COLUMNS,
            DEPTH,
            DESCRIPTORS,
            EVEN_DEPTH,
            PRECISION,
        )
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        live = row < rows
        b = tl.load(bias + column, mask=column < vocabulary, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        it = tl.load(inv_temperature + row, mask=live, other=1.0) if HAS_SCALE else 1.0
        z = transform_logits(z, b, it, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_SCALE)

        logsumexp = tl.load(logsumexp_in + row, mask=live, other=0.0)
        mass = tl.load(mass_in + row, mask=live, other=0.0)
        p = tl.exp2(z * LOG2E - (logsumexp * LOG2E)[:, None])
        if HAS_ENTROPY:
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
        if HAS_MEAN:
            gradient += tl.load(mean_in + row, mask=live, other=0.0)[:, None]
        gradient = untransform_gradient(gradient, z, it, logit_scale, softcap, HAS_SOFTCAP, HAS_SCALE)
        # One 64-bit address per row, 32-bit steps within it: a tile of 64-bit addresses would spill.
        line = gradient_out + row.to(tl.int64) * gradient_stride
        kept = live[:, None] & (column < start + width)[None, :]
        tl.store(
            line[:, None] + (column - start)[None, :],
            (gradient * factor).to(gradient_out.dtype.element_ty),
            mask=kept,
        )


@dataclass(frozen=True)
class Gradients:
    """float32 dX of the given rows; dW and dbias in the parameters' dtypes. None where not asked for."""

    hidden: Tensor | None  # (N, H)
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,)


def dense_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: LogitGradient,
    *,
    bias: Tensor | None,
    inv_temperature: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    tile: ProductTile,
    columns: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    weight_gradient: Tensor | None = None,
    bias_gradient: Tensor | None = None,
    kept: Kept | None = None,
) -> Gradients:
    """Exact gradients of N rows, all of which take part.

    Args:
        hidden: (N, H), unit stride along H.
        weight: (V, H) of the same dtype, unit stride along H.
        inv_temperature: (N,) float32, or None for one.
        columns: vocabulary entries per chunk; a multiple of `tile.columns`, or at least V.
        weight_gradient: (V, H) existing gradient to add into in place, any float dtype, rounded once; by
            default a new one of weight's dtype.
        bias_gradient: (V,), the same for the bias.
        kept: what the forward kept of these rows, in place of recomputing it. Not with a softcap, nor with
            gradients of the entropy or the mean; rows without a gradient must have finite hidden states.
    """
    count, hidden_size = hidden.shape
    vocabulary = weight.shape[0]
    kind = {"dtype": torch.float32, "device": hidden.device}
    of_hidden = torch.zeros(count, hidden_size, **kind) if need_hidden else None
    of_weight, of_bias = weight_gradient, bias_gradient
    new = torch.empty_like if count else torch.zeros_like
    if need_weight and of_weight is None:
        of_weight = new(weight, memory_format=torch.contiguous_format)
    if need_bias and of_bias is None:
        of_bias = new(bias)
    if count == 0:
        return Gradients(of_hidden, of_weight, of_bias)
    scale = _power_of_two_scale(rows, inv_temperature, logit_scale)
    workspace = torch.empty(
        count, _aligned(min(columns, vocabulary)), dtype=hidden.dtype, device=hidden.device
    )
    for start in range(0, vocabulary, columns):
        width = min(columns, vocabulary - start)
        gradient = workspace[:, :width]
        if kept is not None:
            kept_gradient(
                kept, targets, rows.logsumexp, rows.mass, rows.target, inv_temperature, logit_scale,
                scale.reciprocal(), gradient, start,
            )  # fmt: skip
        else:
            _launch(
                hidden, weight, targets, rows, bias, inv_temperature, logit_scale, softcap, tile, scale,
                gradient, start,
            )  # fmt: skip
        if of_hidden is not None:
            _accumulate(of_hidden, gradient, weight[start : start + width])
        if need_weight:
            part = _product(gradient.t(), hidden)
            _put(of_weight[start : start + width], part, scale, add=weight_gradient is not None)
        if need_bias:
            part = gradient.sum(0, dtype=torch.float32)
            _put(of_bias[start : start + width], part, scale, add=bias_gradient is not None)
    return Gradients(None if of_hidden is None else of_hidden.mul_(scale), of_weight, of_bias)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: LogitGradient,
    bias: Tensor | None,
    inv_temperature: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    tile: ProductTile,
    scale: Tensor,
    gradient: Tensor,
    start: int,
) -> None:
    """Fills `gradient`, (N, width), with the columns from `start` on."""
    has_scale = inv_temperature is not None or logit_scale != 1.0
    if has_scale and inv_temperature is None:
        inv_temperature = torch.ones_like(rows.mass)
    programs = program_count(hidden.device)
    logit_gradient_kernel[(programs,)](
        *product_operands(hidden, weight, tile),
        bias,
        inv_temperature,
        targets,
        rows.logsumexp,
        rows.mass,
        rows.target,
        rows.entropy,
        rows.entropy_gradient,
        rows.mean,
        scale.reciprocal(),
        gradient,
        hidden.shape[0],
        start,
        gradient.shape[1],
        weight.shape[0],
        hidden.shape[1],
        hidden.stride(0),
        weight.stride(0),
        gradient.stride(0),
        float(logit_scale),
        float(softcap or 0.0),
        programs,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SCALE=has_scale,
        HAS_ENTROPY=rows.entropy is not None,
        HAS_MEAN=rows.mean is not None,
        **product_options(hidden, tile),
    )


def _power_of_two_scale(rows: LogitGradient, inv_temperature: Tensor | None, logit_scale: float) -> Tensor:
    """() float32 power of two at or above the largest coefficient; one when all are zero."""
    coefficients = [rows.mass, rows.target]
    coefficients += [c for c in (rows.entropy_gradient, rows.mean) if c is not None]
    magnitude = torch.stack(coefficients).abs().amax(0) * logit_scale
    if inv_temperature is not None:
        magnitude = magnitude * inv_temperature
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


def _aligned(width: int) -> int:
    """Row length of the workspace: rows begin on 32 bytes, whatever the dtype."""
    return -(-width // 16) * 16
