"""The forward: X Wᵀ whose float32 logits never leave registers, reduced to a few numbers per mass tile.

Ignored rows cost nothing: the others are gathered to the front. Persistent programs write the log-sum-exp of
every mass tile, and the inputs of optional statistics, in the original order; `finalize` folds the tiles into
per-row results. A program's tile is several mass tiles wide, so that the product runs at full speed. An
optional statistic whose output is None is not in the machine code.

No mass tile includes the row's target, whose logit is computed separately: a sum with a target of probability
near 1 would lose the digits of all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import TILE, ProductTile
from .dense import row_aligned
from .product import (
    LOG2E,
    Transform,
    is_target,
    precision,
    product_arguments,
    program_count,
    register_bound,
    tile_position,
    tile_products,
    transform_biased,
    transform_logits,
)

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall


class Gathered(NamedTuple):
    """The rows that are not ignored, in their order, before undefined ones; and their targets' logits."""

    hidden: Tensor  # (N, H)
    inv_temperature: Tensor | None  # (N,) float32
    targets: Tensor  # (N,) int32; -1 where the target is in no row of W
    order: Tensor  # (N,) int64: original row of each gathered one
    count: Tensor  # (1,) int32: gathered rows
    target_logit: Tensor  # (N,) float32 in the original order; zero where the target is in no row of W


class TileStatistics(NamedTuple):
    """Per row and mass tile without the target, float32, T = ceil(V / TILE); None where not wanted.

    Ignored rows are undefined.
    """

    lse: Tensor  # (N, T) log-sum-exp of the tile's logits
    entropy: Tensor | None  # (N, T) of the distribution within the tile
    total: Tensor | None  # (N, T) sum of the tile's logits, with the target's
    maximum: Tensor | None  # (N, T)
    squares: Tensor | None  # (N, T) log Σ (p within the tile)²


# `vocabulary` is specialized: unless it is a multiple of 16, exponentials are stored two bytes at a time.
@triton.jit(do_not_specialize=["programs"])
def forward_kernel(
    hidden,  # (N, H): see tile_products; gathered rows, as the two below
    weight,  # (V, H)
    transform,  # `Transform`
    gathered,  # `Gathered`
    out,  # `TileStatistics`, written
    kept_out,  # (N, V) or None: exp(z - reference)
    reference,  # (N,) float32
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    tile_stride,
    kept_stride,
    programs,
    EVEN_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    HALVES: tl.constexpr = COLUMNS // TILE
    tl.assume(hidden_size > 0)
    rows = tl.load(gathered.count)
    row_blocks = tl.cdiv(rows, ROWS)
    column_blocks = tl.cdiv(vocabulary, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_blocks * column_blocks, programs, flatten=DESCRIPTORS):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        first_row = row_block * ROWS
        first_column = column_block * COLUMNS
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        live = row < rows
        # Loaded while the products run.
        target = tl.load(gathered.targets + row, mask=live, other=-1) - first_column
        z = tile_products(
            hidden, weight, hidden_stride, weight_stride, first_row, first_column, rows, vocabulary,
            hidden_size, ROWS, COLUMNS, DEPTH, DESCRIPTORS, EVEN_DEPTH, PRECISION,
        )  # fmt: skip
        z = transform_logits(z, transform, row, column, rows, vocabulary)
        to = tl.load(gathered.order + row, mask=live, other=0)

        # Positions relative to the tile, in 32 bits: compared with constants, they take no registers.
        offset = tl.arange(0, COLUMNS)
        inside = offset < vocabulary - first_column
        mass_tile = column_block * HALVES + tl.arange(0, HALVES)
        at = to[:, None] * tile_stride + mass_tile[None, :]
        kept = live[:, None] & (mass_tile * TILE < vocabulary)[None, :]
        if out.total is not None:
            counted = z if EVEN_COLUMNS else tl.where(inside[None, :], z, 0.0)
            tl.store(out.total + at, tl.sum(tl.reshape(counted, (ROWS, HALVES, TILE)), axis=2), mask=kept)
        z = tl.where(is_target(target, COLUMNS), float("-inf"), z)
        z = tl.reshape(z, (ROWS, HALVES, TILE))
        if not EVEN_COLUMNS:
            # By positions within a mass tile: those within the whole block take registers on sm_100.
            width = (vocabulary - mass_tile * TILE)[None, :, None]
            z = tl.where(tl.arange(0, TILE)[None, None, :] < width, z, float("-inf"))

        maximum = tl.max(z, axis=2)
        if out.maximum is not None:
            tl.store(out.maximum + at, maximum, mask=kept)
        base = tl.where(maximum == float("-inf"), 0.0, maximum)
        behind = tl.fma(z, LOG2E, (-base * LOG2E)[:, :, None])  # the largest logit, in octaves
        e = tl.exp2(behind)
        mass = tl.sum(e, axis=2)
        log_mass = tl.log(mass)
        tl.store(out.lse + at, base + log_mass, mask=kept)
        if kept_out is not None:
            line = kept_out + to * kept_stride
            above = maximum - tl.load(reference + to, mask=live, other=0.0)[:, None]
            kept_e = tl.reshape(e * tl.exp2(above * LOG2E)[:, :, None], (ROWS, COLUMNS))
            kept_e = kept_e.to(kept_out.dtype.element_ty)
            tl.store(line[:, None] + column[None, :], kept_e, mask=live[:, None] & inside[None, :])
        if out.entropy is not None:
            surprise = tl.sum(e * tl.maximum(behind, -1000.0), axis=2) / LOG2E  # 0·-inf is none
            tl.store(out.entropy + at, tl.where(mass > 0, log_mass - surprise / mass, 0.0), mask=kept)
        if out.squares is not None:
            squares = tl.log(tl.sum(e * e, axis=2)) - 2.0 * log_mass
            tl.store(out.squares + at, tl.where(mass > 0, squares, 0.0), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def order_kernel(targets, gathered, rows, BLOCK: tl.constexpr):
    """List and count the rows that are not ignored, in ascending order, in one program."""
    order = gathered.order
    found = tl.zeros((1,), dtype=tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        works = (tl.load(targets + row, mask=row < rows, other=-1) >= 0).to(tl.int32)
        tl.store(order + found + tl.cumsum(works, axis=0) - works, row.to(tl.int64), mask=works != 0)
        found += tl.sum(works)
    tl.store(gathered.count + tl.arange(0, 1), found)


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def gather_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    transform,  # `Transform`
    targets,  # (N,) int64
    gathered,  # `Gathered`: all but `order` and `count` is written
    rows,
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gather rows, and compute their targets' logits.

    The arithmetic is that of all other logits, so that a tensor core's truncation cancels in log p.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = place < tl.load(gathered.count)
    row = tl.load(gathered.order + place, mask=live, other=0)
    target = tl.load(targets + row, mask=live, other=-1)
    here = live & (target < vocabulary)
    x = hidden + row[:, None] * hidden_stride
    w = weight + target[:, None] * weight_stride
    copied = gathered.hidden + place.to(tl.int64)[:, None] * hidden_size
    products = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for start in range(0, hidden_size, DEPTH):
        step = start + tl.arange(0, DEPTH)
        inside = (step < hidden_size)[None, :]
        x_part = tl.load(x + step[None, :], mask=live[:, None] & inside, other=0.0)
        w_part = tl.load(w + step[None, :], mask=here[:, None] & inside, other=0.0)
        tl.store(copied + step[None, :], x_part, mask=live[:, None] & inside)
        products = tl.dot(x_part, w_part.T, products, input_precision=PRECISION)
    own = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    product = tl.sum(tl.where(own, products, 0.0), axis=1)
    if transform.bias is not None:
        product += tl.load(transform.bias + target, mask=here, other=0.0).to(tl.float32)
    z = transform_biased(product[:, None], transform, row, rows)
    tl.store(gathered.target_logit + row[:, None], z, mask=live[:, None])
    tl.store(gathered.targets + place, tl.where(here, target, -1).to(tl.int32), mask=live)
    if gathered.inv_temperature is not None:
        inverse = tl.load(transform.inv_temperature + row, mask=live)
        tl.store(gathered.inv_temperature + place, inverse, mask=live)


def gather_rows(call: HeadCall) -> Gathered:
    """Gather the rows that are not ignored, without host synchronization."""
    hidden, targets, inv_temperature = call.hidden, call.targets, call.inv_temperature
    rows, depth = hidden.shape
    gathered = Gathered(
        hidden=torch.empty_like(hidden, memory_format=torch.contiguous_format),
        inv_temperature=None if inv_temperature is None else torch.empty_like(inv_temperature),
        targets=torch.empty_like(targets, dtype=torch.int32),
        order=torch.empty_like(targets),
        count=targets.new_empty(1, dtype=torch.int32),
        target_logit=hidden.new_empty(rows, dtype=torch.float32),
    )
    order_kernel[(1,)](targets, gathered, rows, BLOCK=_ORDER_ROWS, num_warps=8)
    gather_kernel[(triton.cdiv(rows, _TARGET_ROWS),)](
        hidden, call.weight, Transform.of(call), targets, gathered, rows, call.vocabulary, depth,
        hidden.stride(0), call.weight.stride(0), ROWS=_TARGET_ROWS,
        DEPTH=128 if hidden.element_size() == 2 else 32, PRECISION=precision(hidden.dtype), num_warps=4,
    )  # fmt: skip
    return gathered


def tile_statistics(
    call: HeadCall,
    gathered: Gathered,
    *,
    tile: ProductTile,
    keep: tuple[Tensor, Tensor] | None = None,
) -> TileStatistics:
    """Compute the requested statistics of every mass tile, without host synchronization.

    Args:
        call: its operands have unit stride along H.
        gathered: its rows.
        keep: (N, V), written with exp(z - reference), and (N,) float32 references: see `exponentials`.
    """
    rows, vocabulary = call.targets.numel(), call.vocabulary
    tiles = triton.cdiv(vocabulary, TILE)

    def per_tile(present: bool) -> Tensor | None:
        return row_aligned(rows, tiles, call.hidden, torch.float32) if present else None

    result = TileStatistics(
        lse=row_aligned(rows, tiles, call.hidden, torch.float32),
        entropy=per_tile(call.entropy),
        total=per_tile(call.mean_logit),
        maximum=per_tile(call.max_logit),
        squares=per_tile(call.log_sum_sq),
    )
    kept, reference = keep or (None, None)
    programs = program_count(call.hidden.device)
    of_work = call._replace(hidden=gathered.hidden, inv_temperature=gathered.inv_temperature)
    forward_kernel[(programs,)](
        **product_arguments(of_work, tile), gathered=gathered, out=result, kept_out=kept,
        reference=reference, tile_stride=result.lse.stride(0),
        kept_stride=0 if kept is None else kept.stride(0), programs=programs,
        EVEN_COLUMNS=vocabulary % TILE == 0,  # a whole mass tile past the vocabulary is never stored
        TILE=TILE, **register_bound(None if tile.descriptors else 255),
    )  # fmt: skip
    return result


_ORDER_ROWS = 2048
_TARGET_ROWS = 16
