"""Policy losses on flat tokens, in plain torch: one definition each, named by one word in the config."""

from typing import TYPE_CHECKING

from grpo_fast.config.lookup import lazy_names
from grpo_fast.objective.config import GRPOLossConfig

__all__ = [
    "GRPOLossConfig",
    "LossFunction",
    "LossInputs",
    "LossOutputs",
    "PairScores",
    "StepTotals",
    "policy_loss",
    "resolve_loss",
]

if TYPE_CHECKING:
    from grpo_fast.objective.loss import policy_loss, resolve_loss
    from grpo_fast.objective.pairs import PairScores
    from grpo_fast.objective.types import LossFunction, LossInputs, LossOutputs, StepTotals
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "loss": ["policy_loss", "resolve_loss"],
            "pairs": ["PairScores"],
            "types": ["LossFunction", "LossInputs", "LossOutputs", "StepTotals"],
        },
    )
