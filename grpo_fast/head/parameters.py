"""The output head's parameters, passed as one: its weight, and what the model does to its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor


class HeadOptions(TypedDict):
    """Keyword arguments of the `linear_*` functions that belong to the head."""

    bias: Tensor | None
    logit_scale: float
    softcap: float | None


@dataclass(frozen=True)
class HeadParameters:
    """logits = cap(logit_scale · (hidden @ weightᵀ + bias)), with cap(z) = softcap · tanh(z / softcap).

    Given whole: `linear_logprob(hidden, head.weight, targets, **head.options)`.
    """

    weight: Tensor  # (V, H), the model's dtype
    bias: Tensor | None = None  # (V,)
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def options(self) -> HeadOptions:
        """All but the weight."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, V) float32. For checks on a few rows; the loss never forms them."""
        logits = hidden.float() @ self.weight.float().T
        if self.bias is not None:
            logits = logits + self.bias.float()
        logits = logits * self.logit_scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
