"""Preferences and ranked groups: losses on the log-probabilities of fixed completions."""

from grpo_fast.preference.catalog import PREFERENCE_LOSSES
from grpo_fast.preference.config import PreferenceLossConfig
from grpo_fast.preference.losses import kto_reference_point, preference_loss
from grpo_fast.preference.ranking_config import RankingLossConfig
from grpo_fast.preference.ranking_losses import RankedInputs, ranking_loss
from grpo_fast.preference.types import PreferenceInputs, PreferenceTotals

__all__ = [
    "PREFERENCE_LOSSES",
    "PreferenceInputs",
    "PreferenceLossConfig",
    "PreferenceTotals",
    "RankedInputs",
    "RankingLossConfig",
    "kto_reference_point",
    "preference_loss",
    "ranking_loss",
]
