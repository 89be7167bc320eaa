"""What a reward function is, and what comes of calling several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# TRL's contract: f(prompts, completions, completion_ids, **columns) -> one number or None a completion.
# A function names the arguments that it wants. It may be async.
RewardFunction = Callable[..., Any]


class RewardError(RuntimeError):
    """A reward function failed. `reward` is its name, `sample` the index of the completion where known."""

    def __init__(self, reward: str, problem: str, sample: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {problem}")
        self.reward = reward
        self.sample = sample


@dataclass(frozen=True)
class RewardResult:
    """Scores of N completions by F reward functions, on the CPU."""

    table: Tensor  # (N, F) float32 as the functions gave them, NaN where one does not apply
    total: Tensor  # (N,) float32 sum of weight × value over those that apply, NaN where none does
    skipped: Mapping[str, str]  # function that failed and was left out by `on_error: skip` -> why


def weighted_sum(table: Tensor, weights: Sequence[float]) -> Tensor:
    """(..., F) -> (...) float32: weight × value over the functions that apply, NaN where none does."""
    # In float64: two sums that are equal on paper must not differ by rounding.
    total = (table.double() * torch.tensor(weights, dtype=torch.float64, device=table.device)).nansum(-1)
    return total.where(table.isfinite().any(-1), torch.nan).float()
