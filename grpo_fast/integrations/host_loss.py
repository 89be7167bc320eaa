"""A policy loss by the settings that TRL and Liger share, as a configuration of ours."""

from __future__ import annotations

from typing import Any

from grpo_fast.objective import GRPOLossConfig
from grpo_fast.objective.catalog import CATALOG

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TOKEN_MEANS = ("cispo", "dapo", "vespo")
"""Those that both divide by the tokens of the whole step (bnpo: by the micro-batch's)."""
LOSS_CONSTANTS = frozenset().union(*(CATALOG[name].fields for name in LOSS_TYPES))
"""Fields of `GRPOLossConfig`, called the same by both."""


def host_config(
    loss_type: str, level: Any, max_completion_length: int | None, constants: dict[str, Any], **options: Any
) -> GRPOLossConfig:
    """One of `LOSS_TYPES`.

    Args:
        level: of the importance ratio, "token" or "sequence".
        constants: all of `LOSS_CONSTANTS`, of which the loss takes its own.
        options: other fields of `GRPOLossConfig`.

    Raises:
        ValueError: an unknown loss, or a combination that we do not compute.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type = {loss_type!r} is unknown; choose one of {', '.join(LOSS_TYPES)}")
    if (loss_type, level) == ("luspo", "token"):
        # The sum over a sequence, averaged over sequences, is Dr. GRPO's with a constant length of one.
        loss_type, max_completion_length = "dr_grpo", 1
    return GRPOLossConfig(
        loss_type,
        importance_sampling_level=level,
        max_completion_length=max_completion_length,
        **{name: value for name, value in constants.items() if name in CATALOG[loss_type].fields},
        **options,
    )
