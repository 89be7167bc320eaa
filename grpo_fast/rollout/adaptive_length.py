"""`max_completion_length` by what completions need: longer if many are cut off, shorter if none is near.

A limit that is too short teaches the model that it never finishes; one that is too long makes every step
wait, and the engine keep memory, for a few stragglers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_fast.rollout.config import AdaptiveLengthConfig, RolloutConfig
from grpo_fast.rollout.types import Completion

GROWTH = 1.5  # of a limit that cuts off too many
SLACK = 1.25  # a shrunk limit over the longest 99 % that were seen: it does not cut off at once


@dataclass(frozen=True)
class StepLengths:
    """One step's completions."""

    truncated: float  # share that the limit cut off
    p99: float  # tokens


class CompletionLength:
    """The limit of the coming rollout. Without a configuration for it, it stays where it is."""

    def __init__(self, start: int, config: AdaptiveLengthConfig | None) -> None:
        self.limit = start
        self._config = config
        self._recent: deque[StepLengths] = deque(maxlen=config.window if config else 1)

    @classmethod
    def of(cls, config: RolloutConfig) -> CompletionLength:
        return cls(config.max_completion_length, config.adaptive_length)

    def metrics(self) -> dict[str, float]:
        """The limit in force, where it may move."""
        return {} if self._config is None else {"completion/length_limit": self.limit}

    def observe(self, completions: Sequence[Completion]) -> None:
        """Learn from a step's completions."""
        if self._config is None:
            return
        lengths = np.array([len(completion.token_ids) for completion in completions])
        truncated = sum(completion.truncated for completion in completions) / len(completions)
        self._recent.append(StepLengths(truncated, float(np.quantile(lengths, 0.99))))
        if len(self._recent) == self._config.window:
            self._adjust(self._config)

    def _adjust(self, config: AdaptiveLengthConfig) -> None:
        truncated = sum(step.truncated for step in self._recent) / len(self._recent)
        longest = max(step.p99 for step in self._recent)
        limit = self.limit
        if truncated > config.grow_above:
            limit = min(config.max, math.ceil(GROWTH * self.limit))
        elif truncated == 0 and longest < config.shrink_below * self.limit:
            limit = max(config.min, math.ceil(SLACK * longest))
        if limit != self.limit:
            self.limit = limit
            self._recent.clear()  # lengths under another limit say nothing about this one

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"limit": self.limit, "recent": [[step.truncated, step.p99] for step in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.limit = state["limit"]
        self._recent.clear()
        self._recent.extend(StepLengths(*step) for step in state["recent"])
