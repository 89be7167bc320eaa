"""DPO variants that Liger offers and `grpo_fast.preference` does not: functions of a pair's two rewards.

A reward is β (log π_θ(y|x) − log π_ref(y|x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Rewards:
    """Pairs as a variant sees them."""

    chosen: Tensor  # (B,)
    rejected: Tensor  # (B,)
    beta: float
    label_smoothing: float
    tau: float  # temperature of discopop's modulation

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


def _exo_pair(r: Rewards) -> Tensor:
    """EXO, arXiv 2402.00856, eq. 16: KL from the policy's preference to the smoothed label."""
    log_wins, log_loses = logsigmoid(r.margin), logsigmoid(-r.margin)
    of_label, of_other = math.log1p(-r.label_smoothing), math.log(r.label_smoothing)
    return log_wins.exp() * (log_wins - of_label) + log_loses.exp() * (log_loses - of_other)


def _nca_pair(r: Rewards) -> Tensor:
    """NCA, arXiv 2402.05369, for pairs."""
    return -logsigmoid(r.chosen) - 0.5 * (logsigmoid(-r.chosen) + logsigmoid(-r.rejected))


def _bco_pair(r: Rewards) -> Tensor:
    """BCO, arXiv 2404.04656, without its reward shift."""
    return -logsigmoid(r.chosen) - logsigmoid(-r.rejected)


def _sppo_hard(r: Rewards) -> Tensor:
    """SPPO, arXiv 2405.00675, eq. 4.7, with the winner's probability one."""
    return ((r.chosen - 0.5) / r.beta).square() + ((r.rejected + 0.5) / r.beta).square()


def _apo_zero(r: Rewards) -> Tensor:
    """APO, arXiv 2408.06266, eq. 7."""
    return torch.sigmoid(-r.chosen) + torch.sigmoid(r.rejected)


def _apo_down(r: Rewards) -> Tensor:
    """APO, arXiv 2408.06266, eq. 8."""
    return torch.sigmoid(r.chosen) + torch.sigmoid(-r.margin)


def _discopop(r: Rewards) -> Tensor:
    """DiscoPOP, arXiv 2406.08414, eq. 5: the logistic loss and the exponential one, blended."""
    blend = torch.sigmoid(r.margin / r.tau)
    return -logsigmoid(r.margin) * (1 - blend) + torch.exp(-r.margin) * blend


DPO_VARIANTS: dict[str, Callable[[Rewards], Tensor]] = {
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
