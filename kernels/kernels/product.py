"""One tile of logits in float32 registers, and the order in which persistent programs walk the tiles.

Shared by the forward and by the recomputing backward. Operands come through tensor descriptors where the plan
says so (Hopper), through pointers elsewhere; either way rows and columns past the end read something harmless
and are masked by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import ProductTile
from .transform import transform_arguments, transform_logits

if TYPE_CHECKING:
    from grpo_fast.head.problem import HeadProblem


@triton.jit
def tile_position(tile, row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of the tile-th tile.

    GROUP row blocks advance through the columns together: their rows stay in L2 while the weight streams by
        once.
    """
    per_group = GROUP * column_blocks
    first = (tile // per_group) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def tile_logits(
    hidden,  # (N, H): pointer or descriptor of (ROWS, DEPTH) blocks
    weight,  # (V, H): pointer or descriptor of (COLUMNS, DEPTH) blocks
    bias,  # (V,), as the next read where its flag is set
    inv_temperature,  # (N,) float32
    logit_scale,
    softcap,
    hidden_stride,
    weight_stride,
    first_row,
    first_column,
    rows,  # N in use
    vocabulary,
    hidden_size,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(ROWS, COLUMNS) float32 logits."""
    products = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DESCRIPTORS:
        for step in range(tl.cdiv(hidden_size, DEPTH)):
            x = hidden.load([first_row, step * DEPTH])
            w = weight.load([first_column, step * DEPTH])
            products = tl.dot(x, w.T, products, input_precision=PRECISION)
    else:
        row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        column = tl.minimum(first_column + tl.arange(0, COLUMNS), vocabulary - 1).to(tl.int64)
        depth = tl.arange(0, DEPTH)
        x_at = hidden + row[:, None] * hidden_stride + depth[None, :]
        w_at = weight + column[None, :] * weight_stride + depth[:, None]
        for step in range(tl.cdiv(hidden_size, DEPTH)):
            if EVEN_DEPTH:
                x = tl.load(x_at)
                w = tl.load(w_at)
            else:
                inside = depth < hidden_size - step * DEPTH
                x = tl.load(x_at, mask=inside[None, :], other=0.0)
                w = tl.load(w_at, mask=inside[:, None], other=0.0)
            products = tl.dot(x, w, products, input_precision=PRECISION)
            x_at += DEPTH
            w_at += DEPTH
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    b = tl.load(bias + column, mask=column < vocabulary, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    it = tl.load(inv_temperature + row, mask=row < rows, other=1.0) if HAS_SCALE else 1.0
    return transform_logits(products, b, it, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_SCALE)


def product_arguments(problem: HeadProblem, tile: ProductTile) -> dict[str, object]:
    """What a kernel with `tile_logits` takes of the problem and the tile, by the kernel's names.

    Both operands must have unit stride along H. float32 operands go through three TF32 products, exact to
    float32.
    """
    hidden, weight = problem.hidden, problem.weight
    operands: tuple = hidden, weight
    if tile.descriptors:
        operands = (
            TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        )
    return transform_arguments(problem) | {
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
        "PRECISION": "tf32x3" if hidden.dtype == torch.float32 else "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def program_count(device: torch.device) -> int:
    """Persistent programs: one per multiprocessor."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
