"""What a policy loss receives and returns. Everything is flat: one entry per completion token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepTotals:
    """Counts over a whole optimiser step, so that its micro-batches' losses add up to the step's loss."""

    num_tokens: float  # tokens with loss_mask set
    num_sequences: float  # sequences, whether or not a token of theirs is masked out
    measured_tokens: float | None = None  # those that the step's batches hold, which metrics are means over;
    measured_sequences: float | None = None  # None: all, nothing of the step was left out of its batches
    entropy_threshold: float | None = (
        None  # top_entropy_quantile's cut over the step; None: the micro-batch's own
    )


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of completion tokens, packed. N tokens, S sequences.

    Entries where `loss_mask` is false are never read: they may hold anything, NaN included.
    """

    logprobs: Tensor  # (N,) float32, differentiable: log π_θ(token)
    advantages: Tensor  # (N,) float32
    sequence_ids: Tensor  # (N,) int64 in [0, S), tokens of a sequence contiguous and in order
    loss_mask: Tensor  # (N,) bool
    num_sequences: int  # S
    old_logprobs: Tensor | None = None  # (N,) float32; None: exactly on-policy, the ratio is one
    ref_logprobs: Tensor | None = None  # (N,) float32; needed when beta > 0
    sampler_logprobs: Tensor | None = None  # (N,) float32: what the sampler assigned when it drew the token
    entropy: Tensor | None = None  # (N,) float32, differentiable when the head was asked for it
    group_ids: Tensor | None = None  # (N,) int64: completions of one prompt share a group
    totals: StepTotals | None = None  # None: this micro-batch is the whole step
    values: Tensor | None = (
        None  # (N,) float32, differentiable: a value head's prediction, where there is one
    )
    returns: Tensor | None = None  # (N,) float32: what `values` should predict
    policy_weights: Tensor | None = None  # (N,) float32, detached: factor of each token's policy term


@dataclass(frozen=True)
class LossOutputs:
    """A scalar loss, and metrics as detached scalars.

    A metric is its micro-batch's share of the step's mean, so that shares add up over micro-batches;
    a name ending in `_max` or `_min` combines by maximum or minimum instead.
    """

    loss: Tensor  # () float32
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[LossInputs], LossOutputs]
