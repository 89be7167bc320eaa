"""The head's backward over kept pairs: its cost is proportional to their density.

From the lists of `pairs` it computes the pairs' logit gradients (`sparse_pairs`), dW and dbias from those
(`sparse_weight`), and dX over the kept single entries (`sparse_rows`). Every sum has a fixed order: results
are bit-equal from run to run. There is no host synchronization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ENTRY_SHARE
from .pairs import list_pairs
from .select import ActivePairs
from .sparse_pairs import SparseOperands, gradient_unit, pair_gradients
from .sparse_rows import hidden_gradient, keep_entries
from .sparse_weight import weight_gradient
from .two_heads import Divergence

if TYPE_CHECKING:
    from grpo_fast.head.call import HeadCall, Wanted

    from . import SparseConfig


def sparse_backward(
    call: HeadCall,
    live: ActivePairs,
    wanted: Wanted,
    certificate: Tensor,
    *,
    capacity: int,
    config: SparseConfig,
    divergence: Divergence | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dX, dW and dbias, None where not wanted, from at most `capacity` kept pairs.

    With more pairs nothing is written.

    Args:
        call: its operands have unit stride along H.
        live: from `select_live` of the same batch.
        divergence: differentiated in place of the log-probability; `live` is of its gradient.
        certificate: (4,) float32, filled by `certify`.
    """
    pairs, unit = list_pairs(live, capacity, config), gradient_unit(call, live)
    operands = SparseOperands(call, live, pairs, config, divergence, unit)
    gradients = pair_gradients(operands)
    weight = bias = hidden = small = None
    if wanted.weight:
        weight = wanted.into_weight
        if weight is None:
            weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
        accumulate = wanted.into_weight is not None
        weight_gradient(operands, gradients, call.hidden, weight, accumulate=accumulate)
    if wanted.bias:
        bias = torch.empty_like(call.bias, memory_format=torch.contiguous_format)
        ones = call.hidden.new_ones(call.hidden.shape[0], 1)
        weight_gradient(operands, gradients, ones, bias[:, None], accumulate=False)
    if wanted.hidden:
        kept, least, small = keep_entries(operands, gradients)
    certify(operands, small, certificate)
    if wanted.hidden:
        hidden = hidden_gradient(operands, gradients, kept, least)
    return hidden, weight, bias


def certify(operands: SparseOperands, small_entries: Tensor | None, numbers: Tensor) -> None:
    """Fill the numbers of a `Certificate`, (4,) float32; the errors are NaN if a row is not finite.

    Args:
        small_entries: (N, S) float32, of `keep_entries`; None without a gradient of the hidden states.
    """
    live = operands.live
    segments = 0 if small_entries is None else small_entries.shape[1]
    _certificate[(1,)](
        live, small_entries, numbers, live.count.numel(), live.tile_counts.numel(), segments,
        ENTRY=ENTRY_SHARE**2, BLOCK=1024, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "segments"])
def _certificate(
    live,  # `ActivePairs`
    small_entries,  # (N, segments) float32 or None
    numbers,  # (4,) float32, written
    rows,
    tiles,
    segments,
    ENTRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pairs = tl.zeros((BLOCK,), dtype=tl.float32)
    small = tl.zeros((BLOCK,), dtype=tl.float32)
    entries = tl.zeros((BLOCK,), dtype=tl.float32)
    largest = tl.zeros((BLOCK,), dtype=tl.float32) + 1.0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        count = tl.load(live.count + row, mask=inside, other=0)
        pairs += count
        small += tl.load(live.small + row, mask=inside, other=0.0)
        # The error of a row that is not finite is unknown, and so is the batch's.
        size = tl.abs(tl.load(live.masses.mass + row, mask=inside, other=0.0))
        size += tl.abs(tl.load(live.masses.target + row, mask=inside, other=0.0))
        lse = tl.load(live.masses.logsumexp + row, mask=inside, other=0.0)
        size += tl.where(count > 0, tl.abs(lse), 0.0)
        small += tl.where(size < float("inf"), 0.0, float("nan"))
        largest = tl.maximum(largest, tl.load(live.largest + row, mask=inside, other=1.0))
        if small_entries is not None:
            for segment in range(segments):
                entries += tl.load(small_entries + row * segments + segment, mask=inside, other=0.0)
    unit = tl.load(live.threshold.numbers + 2)
    of_pairs = tl.sum(small)
    tl.store(numbers, tl.sum(pairs) / tl.maximum(rows * 1.0 * tiles, 1.0))
    tl.store(numbers + 1, unit * tl.sqrt(of_pairs + ENTRY * tl.sum(entries)))
    tl.store(numbers + 2, unit * tl.sqrt(of_pairs))
    tl.store(numbers + 3, tl.max(largest))
