"""Liger's chunked losses by their own names and signatures: code written for them changes its import only.

Metrics come back in Liger's order, without gradient. `compiled` and `chunk_size` are accepted and have no
effect: nothing is compiled, and no chunk of logits reaches memory.
"""

from grpo_fast.integrations.liger.grpo import LigerFusedLinearGRPOLoss
from grpo_fast.integrations.liger.kto import LigerFusedLinearKTOLoss
from grpo_fast.integrations.liger.pairs import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
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
