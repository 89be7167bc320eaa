"""The logit gradient of every kept pair, from recomputed logits.

One program handles a block of gathered rows of one vocabulary tile. The product stays in float32 registers;
the gradient is rounded once to the operands' dtype and stored in the order by row and then tile. Each row's
gradients are contiguous for dX, and dW finds its rows by their places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ENTRY_SHARE, TILE
from .pairs import Pairs
from .product import (
    LOG2E,
    Transform,
    biased,
    gathered_products,
    precision,
    program_count,
    register_bound,
    transform_logits,
    untransform_gradient,
)
from .select import ActivePairs
from .two_heads import Divergence, Head, both_products, divergence_gradient, is_shared, reference_steps

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall

    from . import SparseConfig


@dataclass(frozen=True)
class SparseOperands:
    """Inputs of every kernel of one backward."""

    call: HeadCall  # its operands have unit stride along H
    live: ActivePairs
    pairs: Pairs
    config: SparseConfig
    divergence: Divergence | None  # differentiated in place of the log-probability
    unit: Tensor | None  # (1,) float32 of `gradient_unit`

    def reference_arguments(self) -> dict[str, object]:
        """Return the kernels' arguments of the divergence's reference."""
        if self.divergence is None:
            return dict.fromkeys(("reference", "of_rows", "beta", "DIRECTION", "SHARED"))
        pair = self.divergence.pair
        return {
            "reference": Head.of(pair.reference), "of_rows": self.divergence.rows, "beta": pair.beta,
            "DIRECTION": pair.direction, "SHARED": is_shared(pair),
        }  # fmt: skip


def gradient_unit(call: HeadCall, live: ActivePairs) -> Tensor | None:
    """Choose the power of two that scales stored logit gradients in float16; None in other dtypes.

    The largest gradient is then near 2^13, so that one of 1e-6 of it is a normal number.
    """
    rows = live.masses
    if call.hidden.dtype != torch.float16 or not rows.mass.numel():
        return None
    size = torch.maximum(rows.mass.abs(), rows.target.abs())
    if rows.entropy_gradient is not None:
        size = size + rows.entropy_gradient.abs() * (1 + rows.entropy)
    drawn = 2 * live.threshold.numbers[1] / ENTRY_SHARE  # a pair that was drawn twice weighs two thresholds
    largest = torch.maximum((size * rows.slope).nan_to_num(0, 0).amax(), drawn)
    exponent = torch.floor(13 - torch.log2(largest.clamp(min=2.0**-100))).clamp(-100, 100)
    return torch.exp2(exponent).reshape(1)


def pair_gradients(operands: SparseOperands) -> Tensor:
    """Compute unit·scale·dL/d(x·w) of every pair at its place, (capacity, TILE) in the dtype of hidden."""
    call, pairs, config, masses = operands.call, operands.pairs, operands.config, operands.live.masses
    hidden, weight = call.hidden, call.weight
    gradients = hidden.new_empty((pairs.capacity, TILE))
    # A bias, softcap, entropy or second head, or unaligned rows, need the registers of half a block; a second
    # head with one of them, or a mixture, needs those of a whole multiprocessor.
    given = operands.divergence
    heads = [call] if given is None else [*given.pair[:2]]
    sides = [(head.hidden, head.weight) for head in heads]
    sizes = [n for x, w in sides for n in (x.shape[1], x.stride(0), w.stride(0), x.data_ptr(), w.data_ptr())]
    aligned = all(size % 16 == 0 for size in sizes)
    whole = (
        aligned and call.bias is None and call.softcap is None and masses.entropy is None and given is None
    )
    bounded = aligned
    if given is not None and aligned:
        bounded = given.pair.direction != "jsd" and all(head.is_plain and head.bias is None for head in heads)
    steps = dict.fromkeys(("REF_DEPTH", "REF_EVEN", "REF_PRECISION"))
    if given is not None:
        steps = reference_steps(given.pair, config.pair_depth * hidden.element_size())
    _pair_gradients[(program_count(hidden.device, config.pair_programs),)](
        transform=Transform.of(call),
        hidden=hidden, weight=weight, masses=masses, pairs=pairs, gradients=gradients,
        unit=operands.unit,
        rows=call.targets.numel(), vocabulary=weight.shape[0], hidden_size=hidden.shape[1],
        hidden_stride=hidden.stride(0), weight_stride=weight.stride(0),
        TILE=TILE, PRECISION=precision(hidden.dtype), BLOCK=config.pair_rows, PARTS=1 if whole else 2,
        DEPTH=config.pair_depth, EVEN_DEPTH=hidden.shape[1] % config.pair_depth == 0,
        num_warps=config.pair_warps, num_stages=config.pair_stages,
        **register_bound(config.pair_registers if bounded else None), **steps,
        **operands.reference_arguments(),
    )  # fmt: skip
    return gradients


@triton.jit(do_not_specialize=["rows", "vocabulary"])
def _pair_gradients(
    hidden,  # (N, H)
    weight,  # (V, H)
    masses,  # `Masses`
    transform,  # `Transform`
    pairs,  # `Pairs`
    gradients,  # (capacity, TILE), written
    unit,  # (1,) float32 or None
    reference,  # `Head` or None, as the next
    of_rows,  # `DivergenceRows`
    beta,
    rows,
    vocabulary,
    hidden_size,
    hidden_stride,
    weight_stride,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    DIRECTION: tl.constexpr,
    SHARED: tl.constexpr,
    REF_DEPTH: tl.constexpr,
    REF_EVEN: tl.constexpr,
    REF_PRECISION: tl.constexpr,
):
    """Process blocks of gathered rows of one tile; the kernel is persistent."""
    PAIR_ROWS: tl.constexpr = BLOCK // PARTS
    blocks = tl.load(pairs.block_offsets + tl.cdiv(vocabulary, TILE))
    for part in range(tl.program_id(0), blocks * PARTS, tl.num_programs(0)):
        block = part // PARTS
        tile = tl.load(pairs.block_tile + block)
        begin = tl.load(pairs.offsets + tile) + (block - tl.load(pairs.block_offsets + tile)) * BLOCK
        index = begin + (part % PARTS) * PAIR_ROWS + tl.arange(0, PAIR_ROWS)
        valid = index < tl.load(pairs.offsets + tile + 1)
        row = tl.load(pairs.rows + index, mask=valid, other=0)
        column = tile * TILE + tl.arange(0, TILE)

        x = hidden + row.to(tl.int64)[:, None] * hidden_stride
        # Columns past the end read the last row of the weight; their gradients are not used.
        within = tl.minimum(column, vocabulary - 1).to(tl.int64)
        w = weight + within[None, :] * weight_stride
        if reference is None:
            products = gathered_products(x, w, hidden_size, DEPTH, EVEN_DEPTH, PRECISION)
        else:
            products, ref_products = both_products(
                x, w, hidden_size, reference, row, within, SHARED, DEPTH, REF_DEPTH, EVEN_DEPTH, REF_EVEN,
                PRECISION, REF_PRECISION,
            )  # fmt: skip
        place = tl.load(pairs.places + index, mask=valid, other=0)
        scale = tl.load(pairs.scales + place, mask=valid, other=0.0)
        h, e = None, None
        if masses.entropy_gradient is not None:
            h, e = tl.load(masses.entropy + row), scale * tl.load(masses.entropy_gradient + row)
        if reference is None:
            gradient = logit_gradient(
                products, transform, tl.load(masses.logsumexp + row), scale * tl.load(masses.mass + row),
                tl.load(masses.target + row), h, e, tl.load(masses.targets + row), row, column, rows,
                vocabulary,
            )  # fmt: skip
        else:
            gradient = scale[:, None] * divergence_gradient(
                products, ref_products, transform, reference.transform, of_rows, beta, row, column, rows,
                vocabulary, DIRECTION,
            )  # fmt: skip
        if unit is not None:
            gradient *= tl.load(unit)
        place = gradients + place.to(tl.int64) * TILE
        stored = gradient.to(gradients.dtype.element_ty)
        tl.store(place[:, None] + tl.arange(0, TILE)[None, :], stored, mask=valid[:, None])


@triton.jit
def logit_gradient(
    products,  # (ROWS, COLUMNS) float32: x·w
    transform,  # `Transform`
    logsumexp,  # (ROWS,), as the next five
    mass_gradient,  # with the pair's scale
    target_gradient,
    entropy,  # or None, as the next, with the pair's scale
    entropy_gradient,
    target,
    row,  # (ROWS,)
    column,  # (COLUMNS,)
    rows,
    vocabulary,
):
    """Compute dL/d(x·w) of every product, (ROWS, COLUMNS) float32."""
    if transform.softcap is None:
        slope = tl.zeros_like(logsumexp) + 1.0  # a row's: multiplying a tile by it would spill
        if transform.inv_temperature is not None:
            inverse = tl.load(transform.inv_temperature + row, mask=row < rows, other=1.0)
            slope = inverse * transform.logit_scale
        z = biased(products, transform.bias, column, vocabulary)
        octaves = tl.fma(z, (slope * LOG2E)[:, None], (-logsumexp * LOG2E)[:, None])
        gradient = (-mass_gradient * slope)[:, None] * tl.exp2(octaves)
        if entropy_gradient is not None:
            gradient -= (entropy_gradient * slope)[:, None] * _surprise(octaves / LOG2E, entropy)
        return tl.where(target[:, None] == column[None, :], (target_gradient * slope)[:, None], gradient)
    logits = transform_logits(products, transform, row, column, rows, vocabulary)
    logp = logits - logsumexp[:, None]
    gradient = -mass_gradient[:, None] * tl.exp(logp)
    if entropy_gradient is not None:
        gradient -= entropy_gradient[:, None] * _surprise(logp, entropy)
    gradient = tl.where(target[:, None] == column[None, :], target_gradient[:, None], gradient)
    return untransform_gradient(gradient, products, transform, row, column, rows, vocabulary)


@triton.jit
def _surprise(logp, entropy):
    """Compute p·(log p + H), zero where p is zero."""
    p = tl.exp2(logp * LOG2E)
    return tl.where(p > 0.0, p * (logp + entropy[:, None]), 0.0)
