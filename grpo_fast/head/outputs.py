"""Results of the head's public functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """Density and error of a sampled backward, from the sampling probabilities.

    NaN until the backward has run, and after a compiled backward. Reading a value synchronizes.
    """

    values: Tensor  # (4,) float32

    NAMES: ClassVar[tuple[str, ...]] = ("density", "hidden_error", "weight_error", "largest_scale")
    SIZE: ClassVar[int] = len(NAMES)

    def __repr__(self) -> str:
        facts = zip(self.NAMES, self.values.tolist(), strict=True)
        return f"Certificate({', '.join(f'{name}={value:.4g}' for name, value in facts)})"

    @classmethod
    def pending(cls, device: torch.device) -> Certificate:
        return cls(torch.full((cls.SIZE,), torch.nan, device=device))

    def fill_exact(self) -> None:
        """Write density 1, errors 0 and scale 1, without a copy from the host."""
        self.values.fill_(1.0)
        self.values[1:3].zero_()

    @property
    def density(self) -> Tensor:
        """Share of the (token, vocabulary tile) pairs that were kept."""
        return self.values[0]

    @property
    def hidden_error(self) -> Tensor:
        """Bound of the hidden gradient's root mean square error, in the unit of `tolerance`; may be NaN.

        It is NaN if a row's gradient is not finite.
        """
        return self.values[1]

    @property
    def weight_error(self) -> Tensor:
        """The same for the weight's gradient; at most `tolerance`."""
        return self.values[2]

    @property
    def largest_scale(self) -> Tensor:
        """Largest importance weight, 1/probability, of a sampled pair: at most 2^18."""
        return self.values[3]


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """Per-token results, float32 (float64 for float64 inputs), in the targets' shape; zero where ignored.

    Unrequested ones are None. `logprob`, `entropy`, `logsumexp` and `mean_logit` are differentiable.
    """

    logprob: Tensor  # (...) nats
    entropy: Tensor | None = None  # (...) nats
    logsumexp: Tensor | None = None  # (...)
    mean_logit: Tensor | None = None  # (...) over the vocabulary
    argmax_is_target: Tensor | None = None  # (...) bool; a tie counts
    log_sum_sq_probs: Tensor | None = None  # (...) log Σ p²: minus the collision entropy
    certificate: Certificate | None = None  # filled by the backward


@dataclass(frozen=True, eq=False)
class KLOutput:
    """Per-token divergences of two heads."""

    divergence: Tensor  # (...) nats, float32 (float64 for float64 inputs); zero where masked
    certificate: Certificate  # filled by the backward


@dataclass(frozen=True, eq=False)
class GRPOLossOutput:
    """A policy loss over a packed batch of N tokens."""

    loss: Tensor  # () float32
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached scalars
    logprobs: Tensor | None = None  # (N,) detached; zero where masked
    entropy: Tensor | None = None  # (N,) detached; None unless requested
    certificate: Certificate | None = None  # filled by the backward
