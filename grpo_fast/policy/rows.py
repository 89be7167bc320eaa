"""Runs of a flat batch as padded rows of about equal lengths, for what computes rows and not documents; and
rows of a tensor several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

LEAST_FILLED = 0.75  # of the longest row beside it; a shorter one goes with rows of its own
FEW_TOKENS = 16  # by which rows may differ all the same


@dataclass(frozen=True)
class Rows:
    """B rows of L places, of as many of the R runs."""

    runs: Tensor  # (B,) int64: which run each row is
    tokens: Tensor  # (B, L) int64 into the flat batch; padding repeats the run's nearest token
    mask: Tensor | None  # (B, L) bool, false for padding; none where there is none


class RowLayout:
    """Runs of consecutive tokens in a few batches of rows.

    Args:
        starts, lengths: of each run, which has a token at least.
        pads: the side of the padding.
        least: places of a row at least.
        together: one batch for all, however their lengths differ.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        *,
        pads: Literal["left", "right"],
        least: int = 1,
        together: bool = False,
    ) -> None:
        sizes, firsts = np.asarray(lengths, np.int64), np.asarray(starts, np.int64)
        self.batches: list[Rows] = []
        places, flat, order, before = [], [], [], 0  # on the host: a mask on the device would wait for it
        for runs in [np.arange(len(sizes))] if together and len(sizes) else alike(sizes):
            width = max(least, int(sizes[runs].max()))
            place = np.arange(width) - (width - sizes[runs, None] if pads == "left" else 0)
            real = (place >= 0) & (place < sizes[runs, None])
            tokens = firsts[runs, None] + place.clip(0, sizes[runs, None] - 1)
            of_rows, index, mask = (torch.from_numpy(part).to(device) for part in (runs, tokens, real))
            self.batches.append(Rows(of_rows, index, None if real.all() else mask))
            places.append(before + real.ravel().nonzero()[0])
            flat.append(tokens[real])
            order.append(runs)
            before += real.size

        def joined(parts: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).to(device)

        self.tokens = joined(flat)  # (T,) int64: the flat token of each result of `join`
        self.runs = joined(order)  # (R,) int64: the run of each row, in the order of the batches
        self._places = joined(places)  # (T,) int64: where it lies among the batches' results

    def join(self, results: Sequence[Tensor]) -> Tensor:
        """(B, L, ...) of each batch -> (T, ...) without the padding, in the order of `tokens`."""
        return torch.cat([result.flatten(0, 1) for result in results]).index_select(0, self._places)


def alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of runs that share a batch, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    batches: list[list[int]] = []
    longest = 0
    for run in order.tolist():
        if not batches or lengths[run] < min(LEAST_FILLED * longest, longest - FEW_TOKENS):
            batches.append([])
            longest = int(lengths[run])
        batches[-1].append(run)
    return [np.array(batch) for batch in batches]


def repeated(rows: Tensor, index: Tensor) -> Tensor:
    """(R, ...) and (K,) int64 -> (K, ...): rows, some several times, their gradients summed in float32."""
    return _Repeated.apply(rows, index)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows[index]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,), wide = ctx.saved_tensors, torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=gradient.device)
        return total.index_add_(0, index, gradient.to(wide)).to(gradient.dtype), None
