"""Reward weights that adapt while a run goes on, within bounds and exactly resumable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from grpo_fast.config.groups import AdaptiveWeightsConfig
from grpo_fast.config.lookup import choices


class AdaptiveWeights:
    """Each reward's configured weight times a factor between `min_factor` and `max_factor`.

    Each step multiplies a factor by exp(rate · (target − running mean)): a reward below its target gains
    weight, one above it loses weight. Penalties (negative weights) grow above their target instead. A reward
    without a target keeps its weight.
    """

    def __init__(self, config: AdaptiveWeightsConfig, names: Sequence[str], base: Sequence[float]) -> None:
        """Raises ValueError for a target of a reward that is not there."""
        for name in config.targets:
            if name not in names:
                raise ValueError(
                    f"adaptive_weights.targets names {name!r}, which is no reward of this run: "
                    f"{choices(name, names)}"
                )
        self.config = config
        self.names = tuple(names)
        self.base = tuple(base)
        self.factors = [1.0] * len(base)
        self.means: list[float | None] = [None] * len(base)

    @property
    def weights(self) -> tuple[float, ...]:
        """In force now."""
        return tuple(weight * factor for weight, factor in zip(self.base, self.factors, strict=True))

    def update(self, table: Tensor) -> None:
        """Learn from one step's rewards (G, n, F), NaN where one does not apply, for the steps to come."""
        for i, column in enumerate(table.double().unbind(-1)):
            self.means[i] = self._smooth(self.means[i], column.nanmean().item())
        low, high = self.config.min_factor, self.config.max_factor
        for i, (name, weight) in enumerate(zip(self.names, self.base, strict=True)):
            mean = self.means[i]
            if mean is not None and name in self.config.targets:
                gap = self.config.targets[name] - mean
                # Clamped before the power, so that a reward of large units cannot overflow it.
                exponent = math.copysign(1.0, weight) * self.config.rate * gap
                factor = self.factors[i] * math.exp(min(50.0, max(-50.0, exponent)))
                self.factors[i] = min(high, max(low, factor))

    def metrics(self) -> dict[str, float]:
        return {f"reward/{name}/weight": w for name, w in zip(self.names, self.weights, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"factors": list(self.factors), "means": list(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["factors"]) != len(self.base):
            raise ValueError(
                f"the saved reward weights are of {len(state['factors'])} rewards, this run has "
                f"{len(self.base)}: resume with the rewards of the run"
            )
        self.factors, self.means = list(state["factors"]), list(state["means"])

    def _smooth(self, old: float | None, new: float) -> float | None:
        if not math.isfinite(new):
            return old
        return new if old is None else old + self.config.smoothing * (new - old)
