"""Padded in, packed inside: a trainer's (B, T) batch as its N live tokens, its loss, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, StepTotals, policy_loss


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

    @property
    def totals(self) -> StepTotals:
        """N and B."""
        return StepTotals(self.num_tokens, self.num_sequences)

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

    def constant(self, padded: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """(B, T) -> (N,) of `dtype`, without gradient; None stays None."""
        return None if padded is None else self.pack(padded.detach()).to(dtype)

    def loss_inputs(
        self, logprobs: Tensor, advantages: Tensor, totals: StepTotals, **tensors: Tensor | None
    ) -> LossInputs:
        """The live tokens as a loss takes them.

        Args:
            tensors: other fields of `LossInputs` by name; these and the two before them are (N,).
        """
        return LossInputs(
            logprobs=logprobs,
            advantages=advantages,
            sequence_ids=self.sequence_ids,
            loss_mask=torch.ones_like(self.index, dtype=torch.bool),
            num_sequences=self.num_sequences,
            totals=totals,
            **tensors,
        )


def own_totals(mask: Tensor) -> StepTotals:
    """The live tokens of a padded batch and the sequences that have any. Waits for the device."""
    live = mask != 0
    return StepTotals(num_tokens=float(live.sum()), num_sequences=float(live.any(dim=-1).sum()))


def padded_policy_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals | None, **tensors: Tensor | None
) -> LossOutputs:
    """Our policy loss of a host's padded micro-batch.

    Args:
        mask: (B, T) of any dtype, not zero where a token counts. Other entries are never read.
        totals: counts over the optimiser step; None: the live tokens, and the sequences that have any.
        tensors: fields of `LossInputs` by name, each (B, T), (B, 1) or (B,).
    """
    packing = Packing.of(mask)
    packed = {name: packing.spread(tensor) for name, tensor in tensors.items() if tensor is not None}
    return policy_loss(packing.loss_inputs(totals=totals or own_totals(mask), **packed), config)


def padded_local_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals | None, **tensors: Tensor | None
) -> LossOutputs:
    """`padded_policy_loss`, but with metrics that are this micro-batch's own means, for hosts that average.

    Every weight of a catalogued loss is one over a count of the step, so the loss follows by a factor.
    """
    own = own_totals(mask)
    result = padded_policy_loss(config, mask, own, **tensors)
    if totals is None:
        return result
    if config.facts.aggregation == "token_mean":
        share = max(own.num_tokens, 1) / totals.num_tokens
    else:
        share = max(own.num_sequences, 1) / totals.num_sequences
    return LossOutputs(result.loss * share, result.metrics)
