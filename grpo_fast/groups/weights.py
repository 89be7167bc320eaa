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

    `inverse_std` moves the factors until every reward has the same running deviation within groups in
    proportion to its weight, so that none drowns the others; their weighted mean stays one while none is at a
    bound. A reward without spread says nothing about its scale and keeps its factor.

    `target` multiplies a factor by exp(rate · (target − running mean)) each step: a reward below its target
    gains weight, one above it loses weight. Penalties (negative weights) grow above their target instead.
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
        self.stds: list[float | None] = [None] * len(base)

    @property
    def weights(self) -> tuple[float, ...]:
        """In force now."""
        return tuple(weight * factor for weight, factor in zip(self.base, self.factors, strict=True))

    def update(self, table: Tensor) -> None:
        """Learn from one step's rewards (G, n, F), NaN where one does not apply, for the steps to come."""
        for i, column in enumerate(table.double().unbind(-1)):
            self.means[i] = self._smooth(self.means[i], column.nanmean().item())
            self.stds[i] = self._smooth(self.stds[i], _spread_within_groups(column))
        move = self._towards_equal_spread if self.config.method == "inverse_std" else self._towards_targets
        low, high = self.config.min_factor, self.config.max_factor
        self.factors = [min(high, max(low, factor)) for factor in move()]

    def metrics(self) -> dict[str, float]:
        return {f"reward/{name}/weight": w for name, w in zip(self.names, self.weights, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"factors": list(self.factors), "means": list(self.means), "stds": list(self.stds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["factors"]) != len(self.base):
            raise ValueError(
                f"the saved reward weights are of {len(state['factors'])} rewards, this run has "
                f"{len(self.base)}: resume with the rewards of the run"
            )
        self.factors, self.means, self.stds = (list(state[key]) for key in ("factors", "means", "stds"))

    def _smooth(self, old: float | None, new: float) -> float | None:
        if not math.isfinite(new):
            return old
        return new if old is None else old + self.config.smoothing * (new - old)

    def _towards_equal_spread(self) -> list[float]:
        known = {i: 1 / std for i, std in enumerate(self.stds) if std and self.base[i]}
        total = sum(abs(self.base[i]) for i in known)
        mean = sum(abs(self.base[i]) * inverse for i, inverse in known.items()) / total if known else 1.0
        return [
            factor + self.config.rate * (known[i] / mean - factor) if i in known else factor
            for i, factor in enumerate(self.factors)
        ]

    def _towards_targets(self) -> list[float]:
        factors = []
        for name, factor, weight, mean in zip(self.names, self.factors, self.base, self.means, strict=True):
            gap = 0.0 if mean is None else self.config.targets.get(name, mean) - mean
            # Clamped before the power, so that a reward of large units cannot overflow it.
            exponent = math.copysign(1.0, weight) * self.config.rate * gap
            factors.append(factor * math.exp(min(50.0, max(-50.0, exponent))))
        return factors


def _spread_within_groups(rewards: Tensor) -> float:
    """Mean over groups of the population deviation of (G, n) rewards; NaN where no group is scored."""
    mean = rewards.nanmean(1, keepdim=True)
    return (rewards - mean).square().nanmean(1).sqrt().nanmean().item()
