"""Adapt the weights of rewards during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from grpo_fast.config.groups import AdaptiveWeightsConfig
from grpo_fast.config.lookup import choices


class AdaptiveWeights:
    """Multiply each configured weight by a factor between `min_factor` and `max_factor`.

    Each step multiplies the factor by exp(rate · (target − running mean)): a reward below its target gains
    weight, one above it loses weight. Penalties (negative weights) grow above their target instead. A reward
    without a target keeps its weight.
    """

    def __init__(self, config: AdaptiveWeightsConfig, names: Sequence[str], base: Sequence[float]) -> None:
        """Raise ValueError for a target of an unknown reward."""
        for name in config.targets:
            if name not in names:
                problem = f"adaptive_weights.targets names {name!r}, which is no reward of this run"
                raise ValueError(f"{problem}: {choices(name, names)}")
        self.config = config
        self.names = tuple(names)
        self.base = tuple(base)
        self.factors = [1.0] * len(base)
        self.means: list[float | None] = [None] * len(base)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(weight * factor for weight, factor in zip(self.base, self.factors, strict=True))

    def update(self, table: Tensor) -> None:
        """Update the factors by one step's rewards (G, n, F), NaN where one does not apply."""
        for i, column in enumerate(table.double().unbind(-1)):
            self.means[i] = self._smooth(self.means[i], column.nanmean().item())
        low, high = self.config.min_factor, self.config.max_factor
        for i, (name, weight) in enumerate(zip(self.names, self.base, strict=True)):
            mean = self.means[i]
            if mean is not None and name in self.config.targets:
                gap = self.config.targets[name] - mean
                # Clamped, so that a reward of large units does not overflow.
                exponent = math.copysign(1.0, weight) * self.config.rate * gap
                factor = self.factors[i] * math.exp(min(50.0, max(-50.0, exponent)))
                self.factors[i] = min(high, max(low, factor))

    def metrics(self) -> dict[str, float]:
        return {f"reward/{name}/weight": w for name, w in zip(self.names, self.weights, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"factors": list(self.factors), "means": list(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["factors"]) != len(self.base):
            problem = f"the saved reward weights are of {len(state['factors'])} rewards, this run has "
            raise ValueError(f"{problem}{len(self.base)}: resume with the same rewards")
        self.factors, self.means = list(state["factors"]), list(state["means"])

    def _smooth(self, old: float | None, new: float) -> float | None:
        if not math.isfinite(new):
            return old
        return new if old is None else old + self.config.smoothing * (new - old)
