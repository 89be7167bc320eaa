"""What a preference loss receives: one entry per sequence, log-probabilities summed over its completion."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PreferenceTotals:
    """Counts over a whole optimiser step, so that its micro-batches' losses add up to the step's loss."""

    num_chosen: int  # sequences; as many as rejected ones where they come in pairs
    num_rejected: int
    chosen_tokens: int  # completion tokens of the chosen sequences


@dataclass(frozen=True)
class PreferenceInputs:
    """One micro-batch: C chosen and R rejected completions.

    Pair i is chosen[i] and rejected[i], so C = R, for every loss but KTO, which compares none with another.
    """

    chosen_logprobs: Tensor  # (C,) float, differentiable: log π_θ(y | x), summed over the completion
    rejected_logprobs: Tensor  # (R,) the same
    chosen_lengths: Tensor  # (C,) completion tokens
    rejected_lengths: Tensor  # (R,)
    ref_chosen_logprobs: Tensor | None = None  # (C,) of the reference model; needed by most losses
    ref_rejected_logprobs: Tensor | None = None  # (R,)
    margins: Tensor | None = None  # (C,) what the chosen reward must be ahead by, detached; None: 0
    weights: Tensor | None = None  # (C,) factors of a pair's loss; KTO: (C + R,), the chosen first; None: 1
    kl: Tensor | None = None  # () KTO's reference point, `losses.kto_reference_point` of the whole step
    totals: PreferenceTotals | None = None  # None: this micro-batch is the whole step
