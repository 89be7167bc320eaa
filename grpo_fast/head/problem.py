"""What the head computes, as data: the rows, the weight, and the way from a dot product to a logit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

ROW_IGNORED = -1
"""Target of a row without work; its outputs and gradients are zero."""

ROW_INVALID = -2
"""Target outside the vocabulary: an error on CPU, NaN where asking would stall the device."""


@dataclass(frozen=True)
class HeadProblem:
    """N rows against V entries: z = softcap·tanh((x·w + bias)·logit_scale/softcap)·inv_temperature."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), same dtype
    targets: Tensor  # (N,) int64: < 0 ignored; >= V: worked on, but the target lies in another weight shard
    bias: Tensor | None = None  # (V,)
    inv_temperature: Tensor | None = None  # (N,) float32 or float64; None: one
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def accumulator(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether a logit's slope in the dot product is one."""
        return self.inv_temperature is None and self.logit_scale == 1.0 and self.softcap is None

    def rows(self, index: Tensor | slice) -> HeadProblem:
        """The same problem for a selection of its rows."""
        inv_temperature = None if self.inv_temperature is None else self.inv_temperature[index]
        return replace(
            self, hidden=self.hidden[index], targets=self.targets[index], inv_temperature=inv_temperature
        )


@dataclass(frozen=True)
class Request:
    """Which optional statistics the forward computes; the others come back empty, (0,)."""

    entropy: bool = False
    mean_logit: bool = False
    max_logit: bool = False  # and the target's
    log_sum_sq: bool = False


@dataclass(frozen=True)
class RowStatistics:
    """Per row, in the accumulator's dtype; zero for ignored rows. All differentiable but the last three."""

    logprob: Tensor  # (N,) log-probability of the target; zero where the target is in another shard
    logsumexp: Tensor  # (N,)
    entropy: Tensor  # (N,) nats
    mean_logit: Tensor  # (N,) over the vocabulary
    max_logit: Tensor  # (N,)
    target_logit: Tensor  # (N,) comes with max_logit; zero where the target is in another shard
    log_sum_sq: Tensor  # (N,) log Σ p²

    def in_order(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class RowGradients:
    """Upstream gradient of each differentiable statistic, (N,) or None where there is none."""

    logprob: Tensor | None
    logsumexp: Tensor | None
    entropy: Tensor | None
    mean_logit: Tensor | None

    @property
    def only_logprob(self) -> bool:
        others = (self.logsumexp, self.entropy, self.mean_logit)
        return self.logprob is not None and all(g is None for g in others)

    def live_rows(self) -> Tensor | None:
        """(N,) bool: rows with any upstream gradient; None when there is no gradient at all."""
        given = [g for g in (self.logprob, self.logsumexp, self.entropy, self.mean_logit) if g is not None]
        return torch.stack([g != 0 for g in given]).any(0) if given else None

    def rows(self, index: Tensor | slice) -> RowGradients:
        return RowGradients(
            *(
                None if g is None else g[index]
                for g in (self.logprob, self.logsumexp, self.entropy, self.mean_logit)
            )
        )


@dataclass(frozen=True)
class HeadGradients:
    """What the backward was asked for; None where it was not."""

    hidden: Tensor | None  # (N, H), dtype of hidden
    weight: Tensor | None  # (V, H), dtype of weight
    bias: Tensor | None  # (V,), dtype of bias
