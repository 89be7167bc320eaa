"""Divergence of two heads: a tile of both products stays in registers and is reduced to a few numbers.

Per row and mass tile the forward stores both log-sum-exps and the KL between the two distributions within the
tile. By the chain rule, KL = Σ P_t KL_t + KL(P || Q) over the tiles, so one pass suffices and no term is a
difference of large numbers. Where both heads have one weight, its tile is loaded once. The Jensen-Shannon
divergence takes a second pass, because its mixture needs both log-sum-exps.

A sparse backward also needs the mean absolute deviation D within the tile. The gradient G of a tile's logits
has a known sum S, and max(|S|, D - |S|) ≤ Σ|G| ≤ |S| + D, so the upper bound is at most three times Σ|G|.
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
from .product import precision, program_count, tile_position
from .two_heads import (
    DivergenceRows,
    Head,
    both_logits,
    both_products,
    divergence_gradient,
    is_shared,
    log_ratio,
    over_mixture,
    reference_steps,
)

if TYPE_CHECKING:
    from grpo_fast.head.call import KLCall, Wanted

_ROWS = 64  # registers hold two float32 products of this many rows by TILE columns
_DEPTH_BYTES = 128  # of H per step
_GROUP = 8


class TileDivergence(NamedTuple):
    """Per row and mass tile, (N, T) float32."""

    lse: Tensor  # of the student's logits
    ref_lse: Tensor
    divergence: Tensor  # within the tile
    deviation: Tensor | None  # Σ p·|d - divergence|, or Σ|p - q| of "forward", within the tile


@triton.jit
def _bregman(p, q, d):
    """Compute p·(exp(-d) - 1 + d), where q = p·exp(-d): at least zero, NaN passes through."""
    terms = tl.where(d > -1.0, p * exp_beyond_linear(-d), p * (d - 1.0) + q)
    terms = tl.where(p == 0.0, q, terms)  # whatever d is
    return tl.where(terms < 0.0, 0.0, terms)


@triton.jit
def _softmax(z):
    """Return (ROWS, COLUMNS) probabilities, (ROWS,) maximum, log Σ exp(z - maximum) and log-sum-exp."""
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
    head,  # `Head`
    reference,  # `Head`
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
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        any_row = tl.minimum(row, rows - 1).to(tl.int64)
        any_column = tl.minimum(column, vocabulary - 1).to(tl.int64)
        products, ref_products = both_products(
            head.hidden + any_row[:, None] * head.hidden_stride,
            head.weight + any_column[None, :] * head.weight_stride,
            head.hidden_size, reference, any_row, any_column, SHARED, DEPTH, REF_DEPTH, EVEN,
            REF_EVEN, PRECISION, REF_PRECISION,
        )  # fmt: skip
        live = row < rows
        at = row.to(tl.int64) * tile_stride + first_column // COLUMNS
        if gradient_out is not None:
            gradient = divergence_gradient(
                products, ref_products, head.transform, reference.transform, of_rows, beta, row, column, rows,
                vocabulary, DIRECTION,
            )  # fmt: skip
            if inv_scale is not None:
                gradient *= tl.load(inv_scale)
            offset = tl.arange(0, COLUMNS)
            line = gradient_out + (first_column - start) + row.to(tl.int64) * gradient_stride
            kept = live[:, None] & (offset < start + width - first_column)[None, :]
            stored = gradient.to(gradient_out.dtype.element_ty)
            tl.store(line[:, None] + offset[None, :], stored, mask=kept)
        else:
            z, ref_z = both_logits(
                products, ref_products, head.transform, reference.transform, row, column, rows, vocabulary
            )
            if of_rows is None:
                p, maximum, log_total, lse = _softmax(z)
                q, ref_maximum, ref_log_total, ref_lse = _softmax(ref_z)
                apart = (z - maximum[:, None]) - (ref_z - ref_maximum[:, None])
                d = log_ratio(z, ref_z, apart - (log_total - ref_log_total)[:, None], DIRECTION)
                tl.store(out.lse + at, lse, mask=live)
                tl.store(out.ref_lse + at, ref_lse, mask=live)
                if DIRECTION == "forward":
                    within = tl.sum(_bregman(q, p, -d), axis=1)
                    apart = tl.abs(p - q)
                else:
                    within = tl.sum(_bregman(p, q, d), axis=1)
                    apart = tl.where(p == 0.0, 0.0, p * tl.abs(d - within[:, None]))
                tl.store(out.divergence + at, within, mask=live)
                if out.deviation is not None:
                    tl.store(out.deviation + at, tl.sum(apart, axis=1), mask=live)
            else:
                lse = tl.load(of_rows.logsumexp + row, mask=live, other=0.0)
                ref_lse = tl.load(of_rows.ref_logsumexp + row, mask=live, other=0.0)
                shift = tl.load(of_rows.shift + row, mask=live, other=0.0)
                p = tl.exp(z - lse[:, None])
                q = tl.exp(ref_z - ref_lse[:, None])
                d = log_ratio(z, ref_z, (z - ref_z) - shift[:, None], DIRECTION)
                u = over_mixture(d, beta)
                m = p + beta * (q - p)
                center = tl.sum(_bregman(p, m, u), axis=1)
                of_reference = tl.sum(_bregman(q, m, u - d), axis=1)
                tl.store(out.lse + at, (1.0 - beta) * center + beta * of_reference, mask=live)
                tl.store(out.ref_lse + at, center, mask=live)
                if out.deviation is not None:
                    moment, mass = tl.sum(p * u, axis=1), tl.sum(p, axis=1)
                    mean = moment / tl.where(mass == 0.0, 1.0, mass)
                    tl.store(out.divergence + at, moment, mask=live)
                    tl.store(out.deviation + at, tl.sum(p * tl.abs(u - mean[:, None]), axis=1), mask=live)


def _launch(pair: KLCall, **arguments: object) -> None:
    ours, theirs = map(Head.of, (pair.student, pair.reference))
    programs, depth = program_count(ours.hidden.device, 2), _DEPTH_BYTES // ours.hidden.element_size()
    divergence_kernel[(programs,)](
        ours, theirs, beta=pair.beta, rows=ours.hidden.shape[0], vocabulary=ours.weight.shape[0],
        programs=programs, DIRECTION=pair.direction, ROWS=_ROWS, COLUMNS=TILE, DEPTH=depth,
        EVEN=ours.hidden_size % depth == 0, PRECISION=precision(ours.hidden.dtype), GROUP=_GROUP,
        SHARED=is_shared(pair), num_warps=8, num_stages=2, **reference_steps(pair, _DEPTH_BYTES), **arguments,
    )  # fmt: skip


def tile_divergence(
    pair: KLCall, of_rows: DivergenceRows | None = None, *, deviation: bool
) -> TileDivergence:
    """Compute log-sum-exps, the KL within each tile and, with `deviation`, its mean absolute deviation.

    Operands must have unit stride along H. With `of_rows` the fields hold instead each tile's part of the
    Jensen-Shannon divergence, of KL(student || mixture), and, with `deviation`, Σ p·u and
    Σ p·|u - mean of the tile|, where u = log p - log m.
    """
    hidden, vocabulary = pair.student.hidden, pair.student.vocabulary
    shape = hidden.shape[0], triton.cdiv(vocabulary, TILE)
    tiles = [row_aligned(*shape, hidden, torch.float32) for _ in range(3 + deviation)]
    out = TileDivergence(*tiles[:3], tiles[3] if deviation else None)
    _launch(
        pair, of_rows=of_rows, out=out, gradient_out=None, inv_scale=None, start=0, width=vocabulary,
        tile_stride=out.lse.stride(0), gradient_stride=0,
    )  # fmt: skip
    return out


def divergence_gradients(
    pair: KLCall, of_rows: DivergenceRows, wanted: Wanted, *, columns: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute exact gradients of N rows: float32 dX, dW and dbias; None where not wanted."""

    def fill(gradient: Tensor, start: int, width: int, inv_scale: Tensor | None) -> None:
        _launch(
            pair, of_rows=of_rows, out=None, gradient_out=gradient, inv_scale=inv_scale, start=start,
            width=width, tile_stride=0, gradient_stride=gradient.stride(0),
        )  # fmt: skip

    given = [g for g in (of_rows.of_divergence, of_rows.of_logsumexp) if g is not None]
    return dense_gradients(pair.student, given, wanted, fill, columns=columns)
