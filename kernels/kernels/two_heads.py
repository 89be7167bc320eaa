"""Both products and the divergence's gradient, shared by the kernels of two heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .product import Transform, gathered_products, precision, transform_logits, untransform_gradient

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, KLCall


class DivergenceRows(NamedTuple):
    """Per-row inputs of a divergence's gradient, (N,) float32."""

    logsumexp: Tensor
    ref_logsumexp: Tensor
    shift: Tensor  # their difference, to more digits
    center: Tensor | None = None  # subtracted from log p - log q, or log p - log m, in the gradient
    of_divergence: Tensor | None = None  # upstream gradients
    of_logsumexp: Tensor | None = None


class Head(NamedTuple):
    """One head's kernel arguments; its operands have unit stride along H."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    transform: Transform
    hidden_stride: int
    weight_stride: int
    hidden_size: int

    @classmethod
    def of(cls, call: HeadCall) -> Head:
        hidden, weight = call.hidden, call.weight
        sizes = hidden.stride(0), weight.stride(0), hidden.shape[1]
        return cls(hidden, weight, Transform.of(call), *sizes)


def is_shared(pair: KLCall) -> bool:
    """Return whether both heads have one weight."""
    w, other = pair.student.weight, pair.reference.weight
    same = w.data_ptr() == other.data_ptr() and w.stride() == other.stride()
    return same and w.shape == other.shape and w.dtype == other.dtype


def reference_steps(pair: KLCall, depth_bytes: int) -> dict[str, object]:
    """Return the reference's arguments of `both_products`, for steps of `depth_bytes` of H."""
    hidden = pair.reference.hidden
    depth = depth_bytes // hidden.element_size()
    even, kind = hidden.shape[1] % depth == 0, precision(hidden.dtype)
    return {"REF_DEPTH": depth, "REF_EVEN": even, "REF_PRECISION": kind}


class Divergence(NamedTuple):
    """A divergence that a sparse backward differentiates in place of a log-probability."""

    pair: KLCall  # operands have unit stride along H
    rows: DivergenceRows  # of all N rows


@triton.jit
def both_products(
    x,  # (ROWS, 1) pointers into the student's hidden states
    w,  # (1, COLUMNS) pointers into its weight
    hidden_size,
    reference,  # `Head`
    row,  # (ROWS,) of the reference's hidden states
    column,  # (COLUMNS,) of its weight
    SHARED: tl.constexpr,  # both have one weight
    DEPTH: tl.constexpr,
    REF_DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    REF_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    REF_PRECISION: tl.constexpr,
):
    """Compute both (ROWS, COLUMNS) float32 products; each tile of a SHARED weight is loaded once."""
    other = reference.hidden + row.to(tl.int64)[:, None] * reference.hidden_stride
    if SHARED:
        step = tl.arange(0, DEPTH)
        ours = tl.zeros((x.shape[0], w.shape[1]), dtype=tl.float32)
        theirs = tl.zeros((x.shape[0], w.shape[1]), dtype=tl.float32)
        x, other, w = x + step[None, :], other + step[None, :], w + step[:, None]
        for start in range(0, hidden_size, DEPTH):
            inside = (step < hidden_size - start) | EVEN
            w_part = tl.load(w + start, mask=inside[:, None], other=0.0)
            x_part = tl.load(x + start, mask=inside[None, :], other=0.0)
            ours = tl.dot(x_part, w_part, ours, input_precision=PRECISION)
            x_part = tl.load(other + start, mask=inside[None, :], other=0.0)
            theirs = tl.dot(x_part, w_part, theirs, input_precision=PRECISION)
    else:
        ours = gathered_products(x, w, hidden_size, DEPTH, EVEN, PRECISION)
        w = reference.weight + column.to(tl.int64)[None, :] * reference.weight_stride
        theirs = gathered_products(other, w, reference.hidden_size, REF_DEPTH, REF_EVEN, REF_PRECISION)
    return ours, theirs


@triton.jit
def both_logits(products, ref_products, transform, ref_transform, row, column, rows, vocabulary):
    """Compute both (ROWS, COLUMNS) float32 logits, -inf past the vocabulary."""
    inside = (column < vocabulary)[None, :]
    z = transform_logits(products, transform, row, column, rows, vocabulary)
    ref_z = transform_logits(ref_products, ref_transform, row, column, rows, vocabulary)
    return tl.where(inside, z, float("-inf")), tl.where(inside, ref_z, float("-inf"))


@triton.jit
def log_ratio(z, ref_z, apart, DIRECTION: tl.constexpr):
    """Compute log p - log q, finite except where the divergence is infinite."""
    below: tl.constexpr = float("-inf") if DIRECTION == "forward" else -500.0
    above: tl.constexpr = float("inf") if DIRECTION == "reverse" else 500.0
    absent, ref_absent = z == float("-inf"), ref_z == float("-inf")
    found = tl.where(ref_absent, above, apart)
    return tl.where(absent, tl.where(ref_absent, 0.0, below), found)


@triton.jit
def over_mixture(d, beta):
    """Compute log p - log m, m = (1 - beta)·p + beta·q."""
    down = tl.exp(-tl.abs(d))
    above = -tl.log(1.0 - beta + beta * down)
    return tl.where(d < 0.0, d - tl.log((1.0 - beta) * down + beta), above)


@triton.jit
def divergence_gradient(
    products,  # (ROWS, COLUMNS) float32, as the next
    ref_products,
    transform,  # `Transform`, as the next
    ref_transform,
    of_rows,  # `DivergenceRows` with an upstream gradient
    beta,
    row,  # (ROWS,)
    column,  # (COLUMNS,)
    rows,
    vocabulary,
    DIRECTION: tl.constexpr,
):
    """Compute dL/d(x·w + bias), (ROWS, COLUMNS) float32."""
    live = row < rows
    z, ref_z = both_logits(products, ref_products, transform, ref_transform, row, column, rows, vocabulary)
    lse = tl.load(of_rows.logsumexp + row, mask=live, other=0.0)
    p = tl.exp(z - lse[:, None])
    if DIRECTION == "forward":
        ref_lse = tl.load(of_rows.ref_logsumexp + row, mask=live, other=0.0)
        gradient = p - tl.exp(ref_z - ref_lse[:, None])
    else:
        shift = tl.load(of_rows.shift + row, mask=live, other=0.0)
        center = tl.load(of_rows.center + row, mask=live, other=0.0)[:, None]
        d = log_ratio(z, ref_z, (z - ref_z) - shift[:, None], DIRECTION)
        if DIRECTION == "reverse":
            gradient = tl.where(p == 0.0, 0.0, p * (d - center))
        else:
            gradient = (1.0 - beta) * p * (over_mixture(d, beta) - center)
    gradient *= tl.load(of_rows.of_divergence + row, mask=live, other=0.0)[:, None]
    if of_rows.of_logsumexp is not None:
        gradient += p * tl.load(of_rows.of_logsumexp + row, mask=live, other=0.0)[:, None]
    return untransform_gradient(gradient, products, transform, row, column, rows, vocabulary)
