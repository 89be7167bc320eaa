"""The exact backward from exponentials that the forward stored: two cuBLAS products, no logit formed twice.

The forward stores E = exp(z - r) in the operands' dtype. A row's reference r is its target's logit, which is
known first. The target's own entry is zero. With c the target's entry of dL/dz and
s = (dL/dlse - dL/dlogp)·exp(r - lse)

    dX = s·(E W) + c·W_target          dW = Eᵀ(s X) + Σ c_i x_i over the rows i of a target

where E, s X and the results are rounded, but the target's entry, most of the gradient's norm, is not.

A log-sum-exp far from the target's logit would overflow E, or cost s its digits. Such rows are rare: the
forward recomputes them with their log-sum-exp as r (`REACH`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ProductTile
from .dense import float16_scale, product, put
from .forward import gather_rows, tile_statistics

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, LogitGradient, Wanted

REACH = {torch.float16: 5.0, torch.bfloat16: 60.0, torch.float32: 60.0}
"""Nats from r to the log-sum-exp within which E and its sums stay finite, and s keeps its digits."""


class SavedExp(NamedTuple):
    """p = share·E except at the targets. E is zero there, and in rows that are ignored or not finite."""

    exponentials: Tensor  # (N, V) in the operands' dtype: E, rows begin on 32 bytes
    share: Tensor  # (N,) float32: exp(r - lse)


@triton.jit
def zero_invalid_rows(
    exponentials,  # (N, V), zeroed where the share is no positive number
    share_in,  # (N,) float32
    stride,
    vocabulary,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(share_in + row)
    if not ((share > 0) & (share < float("inf"))):
        for start in range(0, vocabulary, WIDTH):
            column = start + tl.arange(0, WIDTH)
            zeros = tl.zeros((WIDTH,), dtype=exponentials.dtype.element_ty)
            tl.store(exponentials + row * stride + column, zeros, mask=column < vocabulary)


@triton.jit(do_not_specialize=["rows"])
def run_sums_kernel(
    sums,  # (ceil(N / RUN), H) float32, written where a target goes on from the places before
    hidden,  # (N, H)
    order,  # (N,) int64: rows by target
    targets,  # (N,) int64, in that order
    target_in,  # (N,) float32: c
    rows,
    hidden_size,
    hidden_stride,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    run = tl.program_id(0)
    place = run * RUN
    target = tl.load(targets + place)
    before = tl.load(targets + place - 1, mask=place > 0, other=-1)
    if (target == before) & (target >= 0):
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        total = _sum_of_run(
            hidden, order, targets, target_in, place, rows, column, hidden_size, hidden_stride, RUN, STEP
        )
        tl.store(sums + run.to(tl.int64) * hidden_size + column, total, mask=column < hidden_size)


@triton.jit(do_not_specialize=["rows", "start", "stop"])
def target_rows_kernel(
    gradient,  # (stop - start, H): columns [start, stop) of dW, added to
    sums,  # of run_sums_kernel
    hidden,  # (N, H)
    order,  # (N,) int64: rows by target
    targets,  # (N,) int64, in that order
    target_in,  # (N,) float32: c
    rows,
    start,
    stop,
    hidden_size,
    hidden_stride,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add each target's run, and the sums of its following runs in their order, to its row."""
    place = tl.program_id(0)
    target = tl.load(targets + place)
    before = tl.load(targets + place - 1, mask=place > 0, other=-1)
    if (target != before) & (target >= start) & (target < stop):
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = column < hidden_size
        at = gradient + (target - start) * hidden_size + column
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total += _sum_of_run(
            hidden, order, targets, target_in, place, rows, column, hidden_size, hidden_stride, RUN, STEP
        )
        run = place // RUN + 1
        while tl.load(targets + run * RUN, mask=run * RUN < rows, other=-1) == target:
            total += tl.load(sums + run.to(tl.int64) * hidden_size + column, mask=inside, other=0.0)
            run += 1
        tl.store(at, total.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of_run(
    hidden,
    order,
    targets,
    target_in,
    place,
    rows,
    column,  # (WIDTH,)
    hidden_size,
    hidden_stride,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
):
    """(WIDTH,) Σ c·x over the target's rows, from a place to at most the next multiple of RUN."""
    within = place % RUN + tl.arange(0, RUN)
    later = tl.load(
        targets + place + tl.arange(0, RUN),
        mask=(within < RUN) & (place + tl.arange(0, RUN) < rows),
        other=-1,
    )
    count = tl.sum((later == tl.load(targets + place)).to(tl.int32), axis=0)
    total = tl.zeros(column.shape, tl.float32)
    for first in range(0, count, STEP):
        offset = first + tl.arange(0, STEP)
        row = tl.load(order + place + offset, mask=offset < count, other=0)
        at_target = tl.load(target_in + row, mask=offset < count, other=0.0)
        read = (at_target != 0)[:, None] & (column < hidden_size)[None, :]  # other rows may hold anything
        x = tl.load(hidden + row[:, None] * hidden_stride + column[None, :], mask=read, other=0.0)
        total += tl.sum(at_target[:, None] * x.to(tl.float32), axis=0)
    return total


def normalize(
    call: HeadCall, exponentials: Tensor, reference: Tensor, logsumexp: Tensor, tile: ProductTile
) -> SavedExp:
    """Prepare a forward's exp(z - reference) for `kept_backward`; the reference is overwritten."""
    live, rows = call.targets >= 0, logsumexp.numel()
    far = live & ((logsumexp - reference).abs() > REACH[exponentials.dtype])
    reference.copy_(torch.where(far, logsumexp, reference))
    share = torch.where(live, (reference - logsumexp).exp(), 0)
    call = call._replace(entropy=False, mean_logit=False, max_logit=False, log_sum_sq=False)
    far_rows = gather_rows(call._replace(targets=torch.where(far, call.targets, -1)))
    tile_statistics(call, far_rows, tile=tile, keep=(exponentials, reference))
    zero_invalid_rows[(rows,)](
        exponentials, share, exponentials.stride(0), call.vocabulary, WIDTH=_WIDTH, num_warps=4
    )  # fmt: skip
    return SavedExp(exponentials, share)


def kept_backward(
    call: HeadCall,
    rows: LogitGradient,
    wanted: Wanted,
    kept: SavedExp,
    *,
    hidden_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute exact dX, dW and dbias, None where not wanted.

    Args:
        call: at least one row, no softcap.
        rows: without gradients of the entropy or the mean.
        hidden_dtype: of dX; None for the hidden states'.
    """
    hidden, weight, targets = call.hidden, call.weight, call.targets
    # Without an upstream gradient the share may be NaN.
    scale, at_target = torch.where(rows.mass == 0, 0, rows.mass * kept.share), rows.target
    if not call.is_plain:
        slope = call.slope(scale[:, None]).reshape(-1)  # one value for all rows, or one each
        scale, at_target = scale * slope, at_target * slope
    of_hidden = of_weight = of_bias = None
    if wanted.hidden:
        of_hidden = hidden.new_empty(hidden.shape, dtype=hidden_dtype or hidden.dtype)
        here = (targets >= 0) & (targets < call.vocabulary)
        live_targets, of_live = targets.where(here, 0), at_target.where(here, 0)
        for part in _chunks(*hidden.shape):
            total = product(kept.exponentials[part], weight).mul_(scale[part, None])
            of_hidden[part] = total.addcmul_(of_live[part, None], weight[live_targets[part]])
    unit = float16_scale(call, rows.coefficients)
    if unit is not None:
        scale, at_target = scale / unit, at_target / unit
    if wanted.weight or wanted.bias:
        gradient = partial(
            _parameter_gradient, kept.exponentials, *targets.sort(stable=True), scale, at_target, unit
        )
    if wanted.weight:
        of_weight = gradient(hidden, weight, wanted.into_weight)
    if wanted.bias and call.bias is not None:
        of_bias = gradient(torch.ones_like(scale)[:, None], call.bias[:, None], None).squeeze(1)
    return of_hidden, of_weight, of_bias


def _parameter_gradient(
    exponentials: Tensor,
    targets: Tensor,  # (N,) int64 sorted, and the rows in that order
    order: Tensor,
    scale: Tensor,  # (N,) float32 in units of `unit`, as the next
    at_target: Tensor,
    unit: Tensor | None,
    x: Tensor,  # (N, K)
    parameter: Tensor,  # (V, K)
    into: Tensor | None,
) -> Tensor:
    """Compute unit·(Eᵀ (scale·x) + Σ at_target·x of each target), new or added to `into`."""
    (vocabulary, width), rows = parameter.shape, targets.numel()
    scaled = torch.mul(x, scale[:, None], out=exponentials.new_empty(x.shape))
    scaled.masked_fill_(scale[:, None] == 0, 0)  # such a row may hold NaN, and zero times NaN is not zero
    result = torch.empty_like(parameter, memory_format=torch.contiguous_format) if into is None else into
    runs, blocks = triton.cdiv(rows, _RUN), triton.cdiv(width, _WIDTH)
    sizes = {"RUN": _RUN, "STEP": _STEP, "WIDTH": _WIDTH, "num_warps": 4}
    sums = at_target.new_empty(runs, width)
    run_sums_kernel[(runs, blocks)](sums, x, order, targets, at_target, rows, width, x.stride(0), **sizes)
    direct = into is None and unit is None and parameter.dtype == exponentials.dtype
    for part in [slice(0, vocabulary)] if direct else _chunks(vocabulary, width):
        left = exponentials[:, part].t()
        gradient = torch.mm(left, scaled, out=result) if direct else product(left, scaled)
        target_rows_kernel[(rows, blocks)](
            gradient, sums, x, order, targets, at_target, rows, part.start, part.stop, width, x.stride(0),
            **sizes,
        )  # fmt: skip
        if not direct:
            put(result[part], gradient, unit, add=into is not None)
    return result


def _chunks(rows: int, width: int) -> list[slice]:
    """Split rows into ranges whose float32 products fit the workspace."""
    step = max(1, _PRODUCT_BYTES // (4 * 128 * width)) * 128
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


_PRODUCT_BYTES = 64 << 20
_WIDTH = 1024
_RUN = 64  # rows of a target that are summed one after the other
_STEP = 8
