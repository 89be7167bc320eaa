"""How beta moves during a run: a schedule over the steps, and the gap between chosen and rejected rewards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_fast.preference.config import BetaConfig


def scheduled_beta(start: float, config: BetaConfig, step: int, total_steps: int) -> float:
    """The beta of the step with this index, from 0: `start` at the first, `config.final` at the last."""
    if config.schedule == "constant" or config.final is None:
        return start
    progress = min(1.0, step / max(1, total_steps - 1))
    if config.schedule == "cosine":
        progress = 0.5 * (1.0 - math.cos(math.pi * progress))
    return start + (config.final - start) * progress


class BetaController:
    """Beta for each step, with a state that resumes exactly.

    With `gap_gain` α the scheduled β₀ becomes β = (1 + α (g − g₀)) β₀, kept within [min, max], where g is the
    mean log-ratio gap of chosen over rejected times β₀, and g₀ the running mean of the gaps before it (β-DPO,
    arXiv 2407.08639, batch-level calibration). The gap is that of the step before: a step's own is known only
    after its last micro-batch.

    Args:
        start: the beta of the loss's configuration.
        config: the run's `preference.beta` section.
        total_steps: optimiser steps of the whole run.
    """

    def __init__(self, start: float, config: BetaConfig, *, total_steps: int) -> None:
        self._start = start
        self._config = config
        self._total_steps = total_steps
        self._excess = 0.0  # of the last step's gap over the running mean before it, in log-ratio
        self._running: float | None = None  # smoothed gap, in log-ratio

    def value(self, step: int) -> float:
        """The beta of the step with this index, from 0."""
        config = self._config
        beta = scheduled_beta(self._start, config, step, self._total_steps)
        beta *= 1.0 + config.gap_gain * beta * self._excess
        if config.max is not None:
            beta = min(beta, config.max)
        return beta if config.min is None else max(beta, config.min)

    def observe(self, gap: float) -> None:
        """Take note of a finished step's mean log-ratio gap, chosen less rejected, without beta."""
        if self._running is None:
            self._running = gap
        smoothing = self._config.gap_smoothing
        self._excess = gap - self._running
        self._running = smoothing * self._running + (1 - smoothing) * gap

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"excess": self._excess, "running": self._running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._excess, self._running = state["excess"], state["running"]
