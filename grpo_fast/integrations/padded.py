"""A trainer's padded (B, T) batch: its live tokens, and our loss of it as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective import GRPOLossConfig, LossInputs, LossOutputs, StepTotals, policy_loss


def live_values(values: Tensor, live: Tensor) -> Tensor:
    """(B,), (B, 1) or (B, T) -> (N,): one value per live token of (B, T), row by row. Differentiable."""
    return _per_token(values, live)[live]


def padded_policy_loss(
    config: GRPOLossConfig, mask: Tensor, totals: StepTotals, **tensors: Tensor | None
) -> LossOutputs:
    """Our policy loss of a host's padded micro-batch.

    Args:
        mask: (B, T) of any dtype, not zero where a token counts. Other entries are never read.
        totals: counts over the optimiser step.
        tensors: fields of `LossInputs` by name, each (B, T), (B, 1) or (B,).
    """
    sequences, length = mask.shape
    flat = {
        name: _per_token(tensor, mask).flatten() for name, tensor in tensors.items() if tensor is not None
    }
    ids = torch.arange(sequences, device=mask.device).repeat_interleave(length)
    live = (mask != 0).flatten()
    inputs = LossInputs(sequence_ids=ids, loss_mask=live, num_sequences=sequences, totals=totals, **flat)
    return policy_loss(inputs, config)


def local_totals(mask: Tensor, num_tokens: float | None, num_sequences: float | None) -> StepTotals:
    """The counts of a step, with metrics that are means over this micro-batch, for hosts that average them.

    Args:
        mask: (B, T), not zero where a token counts.
        num_tokens, num_sequences: over the step; None: the live tokens of this micro-batch, and the sequences
            that have any.
    """
    live = mask != 0
    tokens, sequences = float(live.sum()), float(live.any(dim=-1).sum())
    return StepTotals(
        tokens if num_tokens is None else float(num_tokens),
        sequences if num_sequences is None else float(num_sequences),
        measured_tokens=tokens,
        measured_sequences=sequences,
    )


def _per_token(values: Tensor, mask: Tensor) -> Tensor:
    return (values[:, None] if values.dim() == 1 else values).expand(mask.shape)
