"""Padded in, packed inside: a trainer's (B, T) batch as its N live tokens, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the live tokens of a padded batch lie. Row by row, so that a sequence's tokens stay in order."""

    mask: Tensor  # (B, T) bool
    index: Tensor  # (N,) int64 into the flattened (B·T)

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """Waits for the device: N must be known.

        Args:
            mask: (B, T), a token is live where it is not zero.

        Raises:
            ValueError: another shape.
        """
        if mask.dim() != 2:
            raise ValueError(f"mask must be (B, T), got shape {tuple(mask.shape)}: give one row per sequence")
        live = mask != 0
        return cls(live, live.flatten().nonzero().squeeze(1))

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.mask.shape[0]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.index.shape[0]

    @property
    def sequence_ids(self) -> Tensor:
        """(N,) int64 in [0, B)."""
        return self.index // self.mask.shape[1]

    def pack(self, padded: Tensor) -> Tensor:
        """(B, T, ...) -> (N, ...), differentiable.

        Raises:
            ValueError: the tensor does not have the mask's leading shape.
        """
        if padded.shape[:2] != self.mask.shape:
            raise ValueError(
                f"a tensor of shape {tuple(padded.shape)} does not fit a mask of shape "
                f"{tuple(self.mask.shape)}: both must be (B, T)"
            )
        return padded.flatten(0, 1).index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """(B,), (B, 1) or (B, T) -> (N,): one value per live token."""
        per_row = values[:, None] if values.dim() == 1 else values
        return self.pack(per_row.expand(self.mask.shape))

    def unpack(self, packed: Tensor) -> Tensor:
        """(N,) -> (B, T), zero where no token is live, differentiable."""
        flat = packed.new_zeros(self.mask.numel()).index_copy(0, self.index, packed)
        return flat.view(self.mask.shape)


def pack_if_given(packing: Packing, padded: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, T) -> (N,) of `dtype`, without gradient; None stays None."""
    return None if padded is None else packing.pack(padded.detach()).to(dtype)
