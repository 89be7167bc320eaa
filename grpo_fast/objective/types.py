"""Inputs and outputs of a policy loss, flat: one entry per completion token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import torch
from torch import Tensor

from grpo_fast.objective.catalog import Aggregation

T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
MASKS = (torch.bool, torch.uint8, *INTEGERS, *FLOATS)  # trainers keep masks in any of these


@dataclass(frozen=True)
class StepTotals:
    """Counts over a whole optimizer step, so that its micro-batches' losses add up to the step's loss."""

    num_tokens: float | Tensor  # tokens with loss_mask set
    num_sequences: float  # sequences, also those whose tokens are all masked
    measured_tokens: float | Tensor | None = None  # in the step's batches, for metrics; None: num_tokens
    measured_sequences: float | None = None  # sequences in the step's batches; None: num_sequences
    num_groups: float | None = None  # groups of a trainer's step, for a custom loss


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of completion tokens, packed. N tokens, S sequences.

    Masked entries are never read and may hold anything, NaN included.
    """

    logprobs: Tensor  # (N,) float32, differentiable: log π_θ(token)
    advantages: Tensor  # (N,) float32
    sequence_ids: Tensor  # (N,) int64 in [0, S), tokens of a sequence contiguous and in order
    loss_mask: Tensor  # (N,) bool
    num_sequences: int  # S
    old_logprobs: Tensor | None = None  # (N,) float32; None: exactly on-policy, the ratio is one
    ref_logprobs: Tensor | None = None  # (N,) float32; needed when beta > 0
    exact_kl: Tensor | None = None  # (N,) float32, differentiable: KL(π_θ ‖ π_ref); for kl_estimator "exact"
    sampler_logprobs: Tensor | None = None  # (N,) float32: as the rollout engine sampled the token
    entropy: Tensor | None = None  # (N,) float32, differentiable if the head computed it so
    group_ids: Tensor | None = None  # (N,) int64 in [0, G): completions that share a baseline, in training
    totals: StepTotals | None = None  # None: this micro-batch is the whole step
    policy_weights: Tensor | None = None  # (N,) float32, detached: factor of each token's policy term
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (N,) each: `loss.columns`, and a rollout's

    @property
    def groups(self) -> Segments:
        """Segments of the groups, for a custom loss; the number of groups is read from `group_ids`."""
        ids = present(self.group_ids)
        count = int(ids.max()) + 1 if len(ids) else 0
        return Segments.of(ids, self.loss_mask, count, self.logprobs.dtype)

    @property
    def sequences(self) -> Segments:
        """Segments of the sequences."""
        return Segments.of(self.sequence_ids, self.loss_mask, self.num_sequences, self.logprobs.dtype)


KNOWN_COLUMNS = frozenset(field.name for field in fields(LossInputs)) | {"rewards"}
"""Names that a rollout's custom column cannot have."""

TOKEN_COLUMNS = {
    "advantages": FLOATS, "sequence_ids": INTEGERS, "loss_mask": MASKS, "old_logprobs": FLOATS,
    "ref_logprobs": FLOATS, "sampler_logprobs": FLOATS, "group_ids": INTEGERS, "policy_weights": FLOATS,
}  # fmt: skip
"""Token inputs that do not come from the head, with their dtypes. Add a new one here."""


@dataclass(frozen=True)
class LossOutputs:
    """A scalar loss, and metrics as detached scalars.

    A metric is the micro-batch's share of the step's mean: shares add up. Names ending in `_max` or `_min`
    combine by maximum or minimum instead.
    """

    loss: Tensor  # () float32
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True)
class Segments:
    """Sums and means over the unmasked tokens of each sequence."""

    ids: Tensor  # (N,) int64 in [0, S)
    mask: Tensor  # (N,) bool
    counts: Tensor  # (S,) float: unmasked tokens, at least one so that it can divide
    num_sequences: int  # S

    @staticmethod
    def of(ids: Tensor, mask: Tensor, num_sequences: int, dtype: torch.dtype) -> Segments:
        """Count the tokens, in the dtype of the values to reduce."""
        counts = torch.zeros(num_sequences, dtype=dtype, device=ids.device).index_add(0, ids, mask.to(dtype))
        return Segments(ids, mask, counts.clamp(min=1), num_sequences)

    def sum(self, values: Tensor) -> Tensor:
        """Sum each sequence's tokens: (N,) -> (S,)."""
        kept = torch.where(self.mask, values, 0)
        return kept.new_zeros(self.num_sequences).index_add(0, self.ids, kept)

    def mean(self, values: Tensor) -> Tensor:
        """Average each sequence's tokens: (N,) -> (S,), zero for a sequence without any."""
        return self.sum(values) / self.counts

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Give every token its sequence's value: (S,) -> (N,)."""
        return per_sequence[self.ids]


def token_weights(
    aggregation: Aggregation, segments: Segments, totals: StepTotals, max_completion_length: int | None = None
) -> Tensor:
    """Compute the weights (N,) of the step's loss Σ weight · term, zero for masked tokens.

    With T tokens and S sequences in the step, and |o| tokens in the token's sequence:
    sequence_mean 1/(S·|o|), token_mean 1/T, sequence_sum 1/S, constant_length 1/(S·max_completion_length).
    """
    mask = segments.mask.to(segments.counts.dtype)
    if aggregation == "token_mean":
        tokens = totals.num_tokens
        return mask / (tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1))
    per_sequence = mask / max(totals.num_sequences, 1)
    if aggregation == "sequence_mean":
        return per_sequence / segments.spread(segments.counts)
    if aggregation == "sequence_sum":
        return per_sequence
    if max_completion_length is None:
        raise ValueError(
            "max_completion_length = None, but aggregation 'constant_length' divides by it; set it"
        )
    return per_sequence / max_completion_length


def refuse_gradients(columns: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError for a column that requires grad: a loss reads it as a constant."""
    for name, column in columns.items():
        if column is not None and column.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, but the loss reads it as a constant: give {name}.detach()"
            )


def check_custom(path: str, loss: Tensor, shape: tuple[int, ...], *, differentiable: bool) -> None:
    """Raise ValueError for a custom loss of a wrong shape, without a gradient, or not finite."""
    shown = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if not isinstance(loss, Tensor) or loss.shape != shape:
        wanted = f"a tensor of shape {shape}, a loss for each pair" if shape else "a scalar tensor"
        raise ValueError(f"loss_type = {path!r} returned a loss {shown}; return {wanted}")
    if differentiable and torch.is_grad_enabled() and not loss.requires_grad:
        remedy = "compute it from the log-probabilities without detach(), item() or torch.no_grad()"
        raise ValueError(f"loss_type = {path!r} returned a loss without a gradient; {remedy}")
    if not loss.isfinite().all():
        remedy = "bound its divisors, and the arguments of its logarithms and exponentials"
        raise ValueError(f"loss_type = {path!r} returned a loss that is not finite; {remedy}")


def step_totals(mask: Tensor, num_sequences: int) -> StepTotals:
    """Return the totals of a step of one batch, without waiting for the device."""
    return StepTotals(num_tokens=torch.count_nonzero(mask), num_sequences=float(num_sequences))


def present(value: T | None) -> T:
    """Narrow the type of a value that an earlier check found."""
    assert value is not None
    return value
