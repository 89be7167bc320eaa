"""Sums and means over the sequences of a packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which sequence each token belongs to, and which tokens count."""

    ids: Tensor  # (N,) int64 in [0, S)
    mask: Tensor  # (N,) bool
    counts: Tensor  # (S,) float: tokens that count, at least one so that it can divide
    num_sequences: int  # S

    @staticmethod
    def of(ids: Tensor, mask: Tensor, num_sequences: int, dtype: torch.dtype) -> Segments:
        """`dtype` is that of the numbers that will be reduced."""
        counts = torch.zeros(num_sequences, dtype=dtype, device=ids.device).index_add(0, ids, mask.to(dtype))
        return Segments(ids, mask, counts.clamp(min=1), num_sequences)

    def sum(self, values: Tensor) -> Tensor:
        """(N,) -> (S,): the sum over each sequence's tokens that count."""
        kept = torch.where(self.mask, values, 0)
        return kept.new_zeros(self.num_sequences).index_add(0, self.ids, kept)

    def mean(self, values: Tensor) -> Tensor:
        """(N,) -> (S,): the mean over each sequence's tokens that count; zero where none does."""
        return self.sum(values) / self.counts

    def spread(self, per_sequence: Tensor) -> Tensor:
        """(S,) -> (N,): every token gets its sequence's value."""
        return per_sequence[self.ids]
