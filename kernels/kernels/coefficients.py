"""Coefficients of each row's logit gradient, from the upstream gradients of its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hashing import bits_of, mix, spread
from .policy_terms import expm1

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, RowGradients, RowStatistics


@dataclass(frozen=True)
class RowCoefficients:
    """Coefficients of N rows: dL/dz_v = −p_v·(c + e·(log p_v + H)), and `target` at the target."""

    logsumexp: Tensor  # (N,) float32, as the next five
    target: Tensor  # dL/dz of the target
    mass: Tensor  # c
    slope: Tensor  # largest |dz/d(x·w)|
    entropy: Tensor | None  # H; None: no gradient through the entropy
    entropy_gradient: Tensor | None  # e
    squares: Tensor  # (P,) float64, whose sum is at most Σ_i (Σ_v|G_iv| / 2)²
    salts: Tensor  # (P,) int64, whose sum seeds the batch's draws


class Masses(NamedTuple):
    """The kernels' inputs for the bound of each pair's gradient."""

    tile_lse: Tensor  # (N, T) float32: log-sum-exp of each row's logits over each tile
    logsumexp: Tensor  # (N,) float32
    targets: Tensor  # (N,) int64
    target: Tensor  # (N,) float32, as the next two: see `RowCoefficients`
    mass: Tensor
    slope: Tensor
    entropy: Tensor | None  # (N,) float32, as the next
    entropy_gradient: Tensor | None
    row_stride: int  # of tile_lse
    tiles: int  # T
    vocabulary: int

    @classmethod
    def of(cls, tile_lse: Tensor, targets: Tensor, rows: RowCoefficients, vocabulary: int) -> Masses:
        of_rows = rows.logsumexp, targets, rows.target, rows.mass, rows.slope
        sizes = tile_lse.stride(0), tile_lse.shape[1], vocabulary
        return cls(tile_lse, *of_rows, rows.entropy, rows.entropy_gradient, *sizes)


def row_coefficients(call: HeadCall, statistics: RowStatistics, gradients: RowGradients) -> RowCoefficients:
    """Compute coefficients from upstream gradients of the log-probability, log-sum-exp and entropy.

    The gradient of the mean logit is not sparse: it takes the dense path.
    """
    rows = call.targets.numel()
    programs = triton.cdiv(rows, _ROWS)
    upstream = [None if g is None else g.contiguous() for g in gradients[:3]]  # autograd expands
    entropy = None if upstream[2] is None else statistics.entropy
    target, mass, slope = (statistics.logprob.new_empty(rows) for _ in range(3))
    of_entropy = None if entropy is None else torch.empty_like(mass)
    squares = mass.new_empty(programs, dtype=torch.float64)
    salts = mass.new_empty(programs, dtype=torch.int64)
    if rows:
        _row_coefficients[(programs,)](
            call.targets, statistics.logprob, statistics.logsumexp, entropy, *upstream,
            call.inv_temperature, float(call.logit_scale), call.softcap,
            target, mass, slope, of_entropy, squares, salts, rows, call.vocabulary, BLOCK=_ROWS,
            num_warps=8,
        )  # fmt: skip
    return RowCoefficients(statistics.logsumexp, target, mass, slope, entropy, of_entropy, squares, salts)


_ROWS = 1024


@triton.jit(do_not_specialize=["logit_scale", "rows", "vocabulary"])
def _row_coefficients(
    targets,  # (N,) int64
    logprob,  # (N,) float32, as the next
    logsumexp,
    entropy,  # (N,) float32 or None
    of_logprob,  # (N,) float32 or None, as the next two: upstream gradients
    of_logsumexp,
    of_entropy,
    inv_temperature,  # (N,) float32 or None
    logit_scale,
    softcap,
    target_out,  # (N,) float32, written, as the next two
    mass_out,
    slope_out,
    entropy_out,  # (N,) float32, written, or None
    squares,  # (programs,) float64, written
    salts,  # (programs,) int64, written
    rows,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    target = tl.load(targets + row, mask=inside, other=-1)
    works = target >= 0  # an ignored row may hold NaN
    here = works & (target < vocabulary)
    logp = tl.load(logprob + row, mask=works, other=0.0)
    lse = tl.load(logsumexp + row, mask=works, other=0.0)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    of_target = tl.zeros((BLOCK,), dtype=tl.float32)
    of_row = tl.zeros((BLOCK,), dtype=tl.float32)
    drawn_for = tl.zeros((BLOCK,), dtype=tl.uint32)
    if of_logprob is not None:
        g = tl.load(of_logprob + row, mask=here, other=0.0)
        mass += g
        of_target -= g * expm1(logp)  # near p = 1, 1 − p is rounding noise
    if of_logsumexp is not None:
        g = tl.load(of_logsumexp + row, mask=works, other=0.0)
        mass -= g
        of_row += g
        of_target += tl.where(g == 0.0, 0.0, g * tl.exp(logp))
    if of_entropy is not None:
        g = tl.load(of_entropy + row, mask=works, other=0.0)
        surprise = tl.maximum(logp, -500.0) + tl.load(entropy + row, mask=works, other=0.0)
        of_target -= tl.where(g == 0.0, 0.0, g * tl.exp(logp) * surprise)
        tl.store(entropy_out + row, g, mask=inside)
        drawn_for = mix(bits_of(g))
    slope = tl.zeros((BLOCK,), dtype=tl.float32) + tl.abs(logit_scale)
    inverse = slope / tl.abs(logit_scale)
    if inv_temperature is not None:
        inverse = tl.load(inv_temperature + row, mask=works, other=1.0)
        slope *= inverse
    tl.store(target_out + row, of_target, mask=inside)
    tl.store(mass_out + row, mass, mask=inside)
    tl.store(slope_out + row, slope, mask=inside)
    # Half the l1 norm, at least: the target's entry and the sum of all others. All entries sum to `of_row`.
    at_target = tl.where(here, tl.abs(of_target), 0.0)
    elsewhere = tl.abs(tl.where(here, of_row - of_target, mass))
    if softcap is not None:  # the others' slope is taken at the log-sum-exp, near which most of them lie
        capped = (logp + lse) / (inverse * softcap)
        at_target *= tl.maximum(1.0 - capped * capped, 0.0)
        capped = lse / (inverse * softcap)
        elsewhere *= tl.maximum(1.0 - capped * capped, 0.0)
    norm = 0.5 * (at_target + elsewhere) * slope
    # In float64, because the square of 1e-25 underflows in float32; rows that are not finite do not count.
    norm = tl.where(norm < float("inf"), norm, 0.0).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(norm * norm))
    drawn_for = mix(bits_of(mass) + drawn_for)
    salt = mix(bits_of(lse) ^ mix(spread(row) + target.to(tl.uint32) + drawn_for))
    tl.store(salts + tl.program_id(0), tl.sum(tl.where(works, salt.to(tl.int64), 0)))
