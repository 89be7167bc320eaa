"""Entropy: a bonus with a fixed or steered weight, and policy gradients on high-entropy tokens only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.objective.catalog import GRPOLossConfig


def entropy_threshold(entropy: Tensor, mask: Tensor, quantile: float) -> float:
    """The entropy from which a token is among the top `quantile` of those that count.

    Beyond the 80/20 Rule, arXiv 2506.01939, eq. 6. Give it a whole step's tokens and put the result in
    `StepTotals.entropy_threshold`: then the choice does not depend on how the step is cut into micro-batches.

    Args:
        entropy: (N,) nats.
        mask: (N,) bool.
        quantile: the share to keep, in [0, 1]; 0 keeps the highest token.
    """
    kept = entropy.detach()[mask]
    if kept.numel() == 0:
        return float("inf")
    # torch.quantile refuses more than 2^24 entries; a sort has no limit and interpolates the same way.
    position = (1 - quantile) * (kept.numel() - 1)
    ordered = kept.sort().values
    below = int(position)
    above = min(below + 1, kept.numel() - 1)
    return float(torch.lerp(ordered[below], ordered[above], position - below))


@dataclass
class EntropyController:
    """Steers `entropy_coef` between optimiser steps. Skywork-OR1, arXiv 2505.22312, section 3.2.5.

    The coefficient rises by `entropy_coef_delta` after a step whose mean entropy was at or below
    `entropy_target`, falls by it after any other, and acts only while the last step's was at or below it.
    """

    config: GRPOLossConfig
    coef: float
    last_entropy: float = float("inf")

    @classmethod
    def of(cls, config: GRPOLossConfig) -> EntropyController:
        return cls(config, coef=config.entropy_coef)

    @property
    def active_coef(self) -> float:
        """The coefficient for the coming step, to be put into the config by `dataclasses.replace`."""
        return self.coef if self.last_entropy <= self.config.entropy_target else 0.0

    def update(self, entropy: float) -> None:
        """Take in a finished step's mean entropy over the tokens the bonus acted on, nats."""
        config = self.config
        if entropy <= config.entropy_target:
            self.coef = min(self.coef + config.entropy_coef_delta, config.entropy_coef_max)
        else:
            self.coef = max(self.coef - config.entropy_coef_delta, config.entropy_coef_min)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]
