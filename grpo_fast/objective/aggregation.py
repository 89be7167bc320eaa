"""The weight of each token in the loss: how tokens, sequences and the step are averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.objective.catalog import Aggregation
from grpo_fast.objective.segments import Segments
from grpo_fast.objective.types import StepTotals


def token_weights(
    aggregation: Aggregation, segments: Segments, totals: StepTotals, max_completion_length: int | None = None
) -> Tensor:
    """The weights that turn per-token terms into the step's loss, Σ weight · term.

    With T tokens and S sequences in the step, and |o| tokens in the token's own sequence:
    sequence_mean 1/(S·|o|), token_mean 1/T, sequence_sum 1/S, constant_length 1/(S·max_completion_length).

    Returns:
        (N,) float, zero where the token does not count.

    Raises:
        ValueError: constant_length without its length.
    """
    mask = segments.mask.to(segments.counts.dtype)
    if aggregation == "token_mean":
        return mask / max(totals.num_tokens, 1)
    per_sequence = mask / max(totals.num_sequences, 1)
    if aggregation == "sequence_mean":
        return per_sequence / segments.spread(segments.counts)
    if aggregation == "sequence_sum":
        return per_sequence
    if max_completion_length is None:
        raise ValueError(
            "max_completion_length = None, but loss_type 'dr_grpo' divides by it; set it to the rollout's "
            "max_completion_length"
        )
    return per_sequence / max_completion_length


def step_totals(mask: Tensor, num_sequences: int) -> StepTotals:
    """The totals of a step that is this one batch. Reads a count back from the device."""
    return StepTotals(num_tokens=float(torch.count_nonzero(mask)), num_sequences=float(num_sequences))
