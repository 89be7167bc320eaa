"""Logits in float32 registers, and the tile order of persistent programs.

The plan chooses tensor descriptors (Hopper) or pointers; either way rows and columns past the end read
harmless values, which the caller masks. The logit is

    z = softcap · tanh((x·w + bias) · logit_scale / softcap) · inv_temperature

without the tanh if there is no softcap. Parts that are None are absent from the compiled code. Conventions of
all kernels:

- rows are tokens, columns are vocabulary entries, `inv_temperature` is one float32 per row, None without a
  temperature and with a logit scale of 1;
- a *mass tile* is `TILE` columns of one row. The forward stores `tile_lse`, (N, ceil(V / TILE)) float32: the
  log-sum-exp of each row's logits over each tile without the target, -inf for an empty tile;
- a target below zero marks an ignored row, a target of V or more a row whose target is not in this weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import constexpr_function
from triton.tools.tensor_descriptor import TensorDescriptor

from . import ProductTile

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall

LOG2E = tl.constexpr(1.4426950408889634)


@constexpr_function
def _products_start_from_nothing() -> bool:
    """Return whether a tensor core ignores the accumulator of a tile's first step."""
    return not knobs.runtime.interpret and cuda_capability_geq(10)


@triton.jit
def tile_position(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Return (row block, column block) of the tile-th tile.

    GROUP row blocks advance through the columns together, so that their rows stay in L2.
    """
    per_group = GROUP * column_blocks
    first = (tile // per_group) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def tile_products(
    hidden,  # (N, H): pointer or descriptor of (ROWS, DEPTH) blocks
    weight,  # (V, H): pointer or descriptor of (COLUMNS, DEPTH) blocks
    hidden_stride,
    weight_stride,
    first_row,
    first_column,
    rows,  # N in use
    vocabulary,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(ROWS, COLUMNS) float32 x·w of consecutive rows and columns."""
    if DESCRIPTORS:
        if _products_start_from_nothing():
            products = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        else:  # Zeros unknown to the compiler cost one move, known ones two.
            products = tl.full((ROWS, COLUMNS), (rows < 0).to(tl.float32), tl.float32)
        for step in range(tl.cdiv(hidden_size, DEPTH)):
            x = hidden.load([first_row, step * DEPTH])
            w = weight.load([first_column, step * DEPTH])
            products = tl.dot(x, w.T, products, input_precision=PRECISION)
    else:
        row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        column = tl.minimum(first_column + tl.arange(0, COLUMNS), vocabulary - 1).to(tl.int64)
        products = gathered_products(
            hidden + row[:, None] * hidden_stride, weight + column[None, :] * weight_stride,
            hidden_size, DEPTH, EVEN_DEPTH, PRECISION,
        )  # fmt: skip
    return products


@triton.jit
def gathered_products(
    x,  # (ROWS, 1) pointers
    w,  # (1, COLUMNS) pointers
    hidden_size,
    DEPTH: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(ROWS, COLUMNS) float32 dot products of any rows of X and of W.

    Unless H and the strides are multiples of 16, loads move one element at a time and do not overlap with the
    tensor cores: on sm_90 a K-step of the pair gradient has 245 instructions instead of 79.
    """
    products = tl.zeros((x.shape[0], w.shape[1]), dtype=tl.float32)
    step = tl.arange(0, DEPTH)
    x += step[None, :]
    w += step[:, None]
    for start in range(0, hidden_size, DEPTH):
        if EVEN_DEPTH:
            products = tl.dot(tl.load(x + start), tl.load(w + start), products, input_precision=PRECISION)
        else:
            inside = step < hidden_size - start
            products = tl.dot(
                tl.load(x + start, mask=inside[None, :], other=0.0),
                tl.load(w + start, mask=inside[:, None], other=0.0),
                products,
                input_precision=PRECISION,
            )
    return products


@triton.jit
def is_target(
    target,  # (ROWS,) int32: columns after the tile's first
    COLUMNS: tl.constexpr,
):
    """(ROWS, COLUMNS) whether a column is its row's target.

    It compares groups of eight columns, of which a thread of a tensor core's result holds the same two: one
    instruction per entry, not two.
    """
    last_digit = tl.arange(0, 8)[None, :] == (target & 7)[:, None]
    eight = tl.where(last_digit, (target >> 3)[:, None], -1)
    found = tl.arange(0, COLUMNS // 8)[None, :, None] == eight[:, None, :]
    return tl.reshape(found, (target.shape[0], COLUMNS))


class Transform(NamedTuple):
    """The kernels' inputs to turn a product into a logit."""

    bias: Tensor | None  # (V,)
    inv_temperature: Tensor | None  # (N,) float32
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: HeadCall) -> Transform:
        inv_temperature = call.inv_temperature
        if inv_temperature is None and call.logit_scale != 1.0:
            inv_temperature = call.hidden.new_ones(call.hidden.shape[0], dtype=torch.float32)
        return cls(call.bias, inv_temperature, float(call.logit_scale), call.softcap)


@triton.jit
def transform_logits(
    products,  # (ROWS, COLUMNS) float32: x·w
    transform,  # `Transform`
    row,  # (ROWS,)
    column,  # (COLUMNS,)
    rows,
    vocabulary,
):
    """Compute z of every product, (ROWS, COLUMNS) float32."""
    return transform_biased(biased(products, transform.bias, column, vocabulary), transform, row, rows)


@triton.jit
def transform_biased(z, transform, row, rows):
    """Compute z of every x·w + bias."""
    factor = transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * _tanh(z * (transform.logit_scale / transform.softcap))
        factor = 1.0
    if transform.inv_temperature is not None:
        z *= (tl.load(transform.inv_temperature + row, mask=row < rows, other=1.0) * factor)[:, None]
    return z


@triton.jit
def untransform_gradient(
    gradient,  # (ROWS, COLUMNS) float32: dL/dz
    products,  # of `transform_logits`: a saturated z no longer has its slope
    transform,
    row,
    column,
    rows,
    vocabulary,
):
    """Compute dL/d(x·w + bias) = dL/dz · dz/d(x·w)."""
    if transform.softcap is not None:
        capped = biased(products, transform.bias, column, vocabulary)
        u = tl.abs(capped * (transform.logit_scale / transform.softcap))
        tail = tl.exp2(u * -LOG2E)
        sech = 2.0 * tail * _reciprocal(tl.fma(tail, tail, 1.0))
        gradient *= sech * sech  # 1 - tanh² cancels where it saturates
    if transform.inv_temperature is not None:
        inverse = tl.load(transform.inv_temperature + row, mask=row < rows, other=1.0)
        gradient *= (inverse * transform.logit_scale)[:, None]
    return gradient


@triton.jit
def biased(products, bias, column, vocabulary):
    """Compute x·w + bias."""
    if bias is not None:
        products += tl.load(bias + tl.minimum(column, vocabulary - 1)).to(tl.float32)[None, :]
    return products


@triton.jit
def _tanh(u):
    """Compute tanh to a few ulps, by a series near 0, where a difference of exponentials cancels."""
    square = u * u
    series = tl.fma(square, 0.0172569904, -0.0530529502)
    series = tl.fma(square, tl.fma(square, series, 0.133259873), -0.333331484)
    tail = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
    far = tl.fma(-2.0 * tail, _reciprocal(1.0 + tail), 1.0)
    return tl.where(tl.abs(u) < 0.5, tl.fma(u * square, series, u), tl.where(u < 0.0, -far, far))


@triton.jit
def _reciprocal(x):
    """Compute 1/x for x > 0: a root is one instruction, a division eight."""
    return tl.rsqrt(x * x)


def product_arguments(call: HeadCall, tile: ProductTile) -> dict[str, object]:
    """Return the arguments of a kernel with `tile_products`; operands must have unit stride along H."""
    hidden, weight = call.hidden, call.weight
    operands: tuple = hidden, weight
    if tile.descriptors:
        operands = (
            TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        )
    return {
        "transform": Transform.of(call),
        "hidden": operands[0],
        "weight": operands[1],
        "vocabulary": weight.shape[0],
        "hidden_size": hidden.shape[1],
        "hidden_stride": hidden.stride(0),
        "weight_stride": weight.stride(0),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "DESCRIPTORS": tile.descriptors,
        "EVEN_DEPTH": hidden.shape[1] % tile.depth == 0,
        "PRECISION": precision(hidden.dtype),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def precision(dtype: torch.dtype) -> str:
    """Return the input precision: three TF32 products are exact to float32; AMD multiplies float32."""
    return "tf32x3" if dtype == torch.float32 and not torch.version.hip else "ieee"


def register_bound(most: int | None) -> dict[str, int]:
    """Return the launch option that bounds a thread's registers, which AMD's compiler does not have.

    With a bound, NVIDIA's assembler does not spill to fit one more program on a multiprocessor.
    """
    return {} if most is None or torch.version.hip else {"maxnreg": most}


def program_count(device: torch.device, per_multiprocessor: int = 1) -> int:
    """Return the number of programs of a persistent kernel."""
    if device.type != "cuda":
        return 2
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count
