"""Two heads at once: a tile of both products in registers, reduced to what a divergence needs of it.

Per row and mass tile the forward keeps both log-sum-exps and the KL between the two distributions within the
tile. The chain rule puts them together, KL = Σ P_t KL_t + KL(P || Q) over the tiles, so one pass suffices and
no term is a difference of large numbers. Where both heads have one weight, its tile is loaded once. The
mixture of the Jensen-Shannon divergence needs both log-sum-exps: it takes a second pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import TILE
from .dense import dense_gradients, row_aligned
from .policy_terms import exp_beyond_linear
from .product import (
    Transform,
    precision,
    program_count,
    tile_position,
    tile_products,
    transform_logits,
    untransform_gradient,
)

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, Wanted

# Two float32 products and what is made of them take the registers of this many rows by TILE columns.
_ROWS = 64
_DEPTH_BYTES = 128  # of H per step
_GROUP = 8


class TileDivergence(NamedTuple):
    """Per row and mass tile, (N, T) float32."""

    lse: Tensor  # of the student's logits
    ref_lse: Tensor
    divergence: Tensor  # within the tile


class DivergenceRows(NamedTuple):
    """Of every row, (N,) float32."""

    logsumexp: Tensor
    ref_logsumexp: Tensor
    shift: Tensor  # their difference, to more digits
    center: Tensor | None = None  # what log p - log q, or log p - log m, is relative to in the gradient
    of_divergence: Tensor | None = None  # upstream, as the next, which may be missing
    of_logsumexp: Tensor | None = None


class _Head(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    transform: Transform
    hidden_stride: int
    weight_stride: int
    hidden_size: int


@triton.jit
def _shared_products(
    head, reference, first_row, first_column, rows, vocabulary,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Both (ROWS, COLUMNS) float32 products with one weight, each tile of which is loaded once."""
    row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
    column = tl.minimum(first_column + tl.arange(0, COLUMNS), vocabulary - 1).to(tl.int64)
    step = tl.arange(0, DEPTH)
    x = head.hidden + row[:, None] * head.hidden_stride + step[None, :]
    other = reference.hidden + row[:, None] * reference.hidden_stride + step[None, :]
    w = head.weight + column[None, :] * head.weight_stride + step[:, None]
    ours = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    theirs = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, head.hidden_size, DEPTH):
        inside = (step < head.hidden_size - start) | EVEN
        w_part = tl.load(w + start, mask=inside[:, None], other=0.0)
        x_part = tl.load(x + start, mask=inside[None, :], other=0.0)
        ours = tl.dot(x_part, w_part, ours, input_precision=PRECISION)
        x_part = tl.load(other + start, mask=inside[None, :], other=0.0)
        theirs = tl.dot(x_part, w_part, theirs, input_precision=PRECISION)
    return ours, theirs


@triton.jit
def _bregman(p, q, d):
    """p·(exp(-d) - 1 + d), where q = p·exp(-d); at least zero, and a NaN stays one."""
    terms = tl.where(d > -1.0, p * exp_beyond_linear(-d), p * (d - 1.0) + q)
    terms = tl.where(p == 0.0, q, terms)  # whatever d is
    return tl.where(terms < 0.0, 0.0, terms)


@triton.jit
def _difference(z, ref_z, difference, DIRECTION: tl.constexpr):
    """log p - log q, finite except where it makes the divergence infinite."""
    below: tl.constexpr = float("-inf") if DIRECTION == "forward" else -500.0
    above: tl.constexpr = float("inf") if DIRECTION == "reverse" else 500.0
    absent, ref_absent = z == float("-inf"), ref_z == float("-inf")
    found = tl.where(ref_absent, above, difference)
    return tl.where(absent, tl.where(ref_absent, 0.0, below), found)


@triton.jit
def _over_mixture(d, beta):
    """log p - log m, m = (1 - beta)·p + beta·q."""
    down = tl.exp(-tl.abs(d))
    above = -tl.log(1.0 - beta + beta * down)
    return tl.where(d < 0.0, d - tl.log((1.0 - beta) * down + beta), above)


@triton.jit
def _softmax(z):
    """(ROWS, COLUMNS) probabilities, (ROWS,) maximum or zero, log Σ exp(z - maximum) or zero, log-sum-exp."""
    maximum = tl.max(z, axis=1)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    e = tl.exp(z - maximum[:, None])
    total = tl.sum(e, axis=1)
    safe = tl.where(total == 0.0, 1.0, total)
    log_total = tl.log(safe)
    lse = tl.where(total == 0.0, float("-inf"), maximum + log_total)
    return e / safe[:, None], maximum, log_total, lse


@triton.jit(do_not_specialize=["rows", "start", "programs", "beta"])
def divergence_kernel(
    head,  # `_Head`
    reference,  # `_Head`
    of_rows,  # `DivergenceRows`, or None in the first pass
    out,  # `TileDivergence`, written, or None
    gradient_out,  # (N, width) or None: dL/d(x·w + bias)·inv_scale of columns [start, start + width)
    inv_scale,  # () float32 or None
    beta,
    rows,
    start,  # a multiple of COLUMNS
    width,  # a multiple of 16, or V
    vocabulary,
    tile_stride,
    gradient_stride,
    programs,
    DIRECTION: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    REF_DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    REF_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    REF_PRECISION: tl.constexpr,
):
    row_blocks = tl.cdiv(rows, ROWS)
    column_blocks = tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), row_blocks * column_blocks, programs):
        row_block, column_block = tile_position(tile, row_blocks, column_blocks, GROUP)
        first_row = row_block * ROWS
        first_column = start + column_block * COLUMNS
        if SHARED:
            products, ref_products = _shared_products(
                head,
                reference,
                first_row,
                first_column,
                rows,
                vocabulary,
                ROWS,
                COLUMNS,
                DEPTH,
                EVEN,
                PRECISION,
            )
        else:
            products = tile_products(
                head.hidden, head.weight, head.hidden_stride, head.weight_stride, first_row, first_column,
                rows, vocabulary, head.hidden_size, ROWS, COLUMNS, DEPTH, False, EVEN, PRECISION,
            )  # fmt: skip
            ref_products = tile_products(
                reference.hidden, reference.weight, reference.hidden_stride, reference.weight_stride,
                first_row, first_column, rows, vocabulary, reference.hidden_size, ROWS, COLUMNS, REF_DEPTH,
                False, REF_EVEN, REF_PRECISION,
            )  # fmt: skip
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        live = row < rows
        inside = (column < vocabulary)[None, :]
        z = transform_logits(products, head.transform, row, column, rows, vocabulary)
        ref_z = transform_logits(ref_products, reference.transform, row, column, rows, vocabulary)
        z = tl.where(inside, z, float("-inf"))
        ref_z = tl.where(inside, ref_z, float("-inf"))
        at = row.to(tl.int64) * tile_stride + first_column // COLUMNS
        if of_rows is None:
            p, maximum, log_total, lse = _softmax(z)
            q, ref_maximum, ref_log_total, ref_lse = _softmax(ref_z)
            apart = (z - maximum[:, None]) - (ref_z - ref_maximum[:, None])
            d = _difference(z, ref_z, apart - (log_total - ref_log_total)[:, None], DIRECTION)
            tl.store(out.lse + at, lse, mask=live)
            tl.store(out.ref_lse + at, ref_lse, mask=live)
            if DIRECTION == "forward":
                tl.store(out.divergence + at, tl.sum(_bregman(q, p, -d), axis=1), mask=live)
            else:
                tl.store(out.divergence + at, tl.sum(_bregman(p, q, d), axis=1), mask=live)
        else:
            lse = tl.load(of_rows.logsumexp + row, mask=live, other=0.0)
            ref_lse = tl.load(of_rows.ref_logsumexp + row, mask=live, other=0.0)
            shift = tl.load(of_rows.shift + row, mask=live, other=0.0)
            p = tl.exp(z - lse[:, None])
            q = tl.exp(ref_z - ref_lse[:, None])
            d = _difference(z, ref_z, (z - ref_z) - shift[:, None], DIRECTION)
            if gradient_out is None:
                u = _over_mixture(d, beta)
                m = p + beta * (q - p)
                center = tl.sum(_bregman(p, m, u), axis=1)
                of_reference = tl.sum(_bregman(q, m, u - d), axis=1)
                tl.store(out.lse + at, (1.0 - beta) * center + beta * of_reference, mask=live)
                tl.store(out.ref_lse + at, center, mask=live)
            else:
                center = tl.load(of_rows.center + row, mask=live, other=0.0)[:, None]
                if DIRECTION == "forward":
                    gradient = p - q
                elif DIRECTION == "reverse":
                    gradient = tl.where(p == 0.0, 0.0, p * (d - center))
                else:
                    gradient = (1.0 - beta) * p * (_over_mixture(d, beta) - center)
                gradient *= tl.load(of_rows.of_divergence + row, mask=live, other=0.0)[:, None]
                if of_rows.of_logsumexp is not None:
                    gradient += p * tl.load(of_rows.of_logsumexp + row, mask=live, other=0.0)[:, None]
                gradient = untransform_gradient(
                    gradient, products, head.transform, row, column, rows, vocabulary
                )
                if inv_scale is not None:
                    gradient *= tl.load(inv_scale)
                offset = tl.arange(0, COLUMNS)
                line = gradient_out + (first_column - start) + row.to(tl.int64) * gradient_stride
                kept = live[:, None] & (offset < start + width - first_column)[None, :]
                stored = gradient.to(gradient_out.dtype.element_ty)
                tl.store(line[:, None] + offset[None, :], stored, mask=kept)


class HeadPair(NamedTuple):
    """Rows that all count, of two heads whose operands have unit stride along H."""

    student: HeadCall
    reference: HeadCall
    direction: str
    beta: float

    def launch(self, **arguments: object) -> None:
        ours, theirs = (
            _Head(
                head.hidden, head.weight, Transform.of(head), head.hidden.stride(0), head.weight.stride(0),
                head.hidden.shape[1],
            )
            for head in (self.student, self.reference)
        )  # fmt: skip
        w, other = ours.weight, theirs.weight
        same = w.data_ptr() == other.data_ptr() and w.stride() == other.stride() and w.shape == other.shape
        programs = program_count(ours.hidden.device, 2)
        depth, ref_depth = (_DEPTH_BYTES // side.hidden.element_size() for side in (ours, theirs))
        divergence_kernel[(programs,)](
            ours, theirs, beta=self.beta, rows=ours.hidden.shape[0], vocabulary=ours.weight.shape[0],
            programs=programs, DIRECTION=self.direction, SHARED=same and w.dtype == other.dtype, ROWS=_ROWS,
            COLUMNS=TILE, DEPTH=depth, REF_DEPTH=ref_depth, EVEN=ours.hidden_size % depth == 0,
            REF_EVEN=theirs.hidden_size % ref_depth == 0, GROUP=_GROUP,
            PRECISION=precision(w.dtype), REF_PRECISION=precision(other.dtype), num_warps=8, num_stages=2,
            **arguments,
        )  # fmt: skip


def tile_divergence(pair: HeadPair, of_rows: DivergenceRows | None = None) -> TileDivergence:
    """One pass over all rows: log-sum-exps and the KL within each tile.

    With `of_rows`, each tile's part of the Jensen-Shannon divergence and of KL(student || mixture) in place
    of the log-sum-exps, and nothing else.
    """
    hidden, vocabulary = pair.student.hidden, pair.student.vocabulary
    shape = hidden.shape[0], triton.cdiv(vocabulary, TILE)
    out = TileDivergence(*(row_aligned(*shape, hidden, torch.float32) for _ in range(3)))
    pair.launch(
        of_rows=of_rows, out=out, gradient_out=None, inv_scale=None, start=0, width=vocabulary,
        tile_stride=out.lse.stride(0), gradient_stride=0,
    )  # fmt: skip
    return out


def divergence_gradients(
    pair: HeadPair, of_rows: DivergenceRows, wanted: Wanted, *, columns: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Exact gradients of N rows: float32 dX, dW and dbias; None where not wanted."""

    def fill(gradient: Tensor, start: int, width: int, inv_scale: Tensor | None) -> None:
        pair.launch(
            of_rows=of_rows, out=None, gradient_out=gradient, inv_scale=inv_scale, start=start, width=width,
            tile_stride=0, gradient_stride=gradient.stride(0),
        )  # fmt: skip

    given = [g for g in (of_rows.of_divergence, of_rows.of_logsumexp) if g is not None]
    return dense_gradients(pair.student, given, wanted, fill, columns=columns)
