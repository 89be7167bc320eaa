"""Policy losses on flat tokens, in plain torch: one definition each, named by one word in the config."""

from grpo_fast.objective.catalog import GRPOLossConfig
from grpo_fast.objective.loss import policy_loss, resolve_loss
from grpo_fast.objective.types import LossFunction, LossInputs, LossOutputs, StepTotals

__all__ = [
    "GRPOLossConfig",
    "LossFunction",
    "LossInputs",
    "LossOutputs",
    "StepTotals",
    "policy_loss",
    "resolve_loss",
]
