"""Rewards of the completion's length in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from grpo_fast.rewards.builtins.options import Completions, Scores, lengths, reward

Positive = Annotated[int, Field(ge=1)]


@reward
class Length:
    """−penalty × |tokens − target| / target: 0 at the target, falling on both sides."""

    target: Positive
    penalty: Annotated[float, Field(gt=0)] = 1.0

    def __call__(
        self, completions: Completions, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any
    ) -> Scores:
        return [-self.penalty * abs(n - self.target) / self.target for n in lengths(completion_ids)]


@reward
class SoftOverlong:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13).

    0 up to max_length − cache tokens, falling to −1 at max_length, −1 beyond.
    """

    max_length: Positive
    cache: Positive

    @model_validator(mode="after")
    def _consistent(self) -> SoftOverlong:
        if self.cache > self.max_length:
            raise ValueError(f"cache = {self.cache} exceeds max_length = {self.max_length}; lower it")
        return self

    def __call__(
        self, completions: Completions, completion_ids: Sequence[Sequence[int]] | None = None, **columns: Any
    ) -> Scores:
        free = self.max_length - self.cache
        return [max(-1.0, min(0.0, (free - n) / self.cache)) for n in lengths(completion_ids)]
