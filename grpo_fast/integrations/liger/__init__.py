"""Liger's chunked losses by their own names and signatures: code written for them changes its import only.

Metrics come back in Liger's order, without gradient. `compiled` and `chunk_size` are accepted and have no
effect: nothing is compiled, and no chunk of logits reaches memory.
"""

from grpo_fast.integrations.liger.policy import LigerFusedLinearGRPOLoss
from grpo_fast.integrations.liger.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]
