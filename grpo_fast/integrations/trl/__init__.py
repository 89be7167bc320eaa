"""TRL's trainers on our head.

`patch()` puts `linear_logprob` under the fused LM head of GRPO, RLOO, DPO, KTO and SFT. `FastGRPOTrainer`, a
`trl.GRPOTrainer`, goes further; it is looked up on first use, since it loads TRL's trainers.

Raises:
    ImportError: TRL is missing, or of a version whose fused LM head is not known.
"""

from grpo_fast.integrations.trl.patch import patch, patched, unpatch

__all__ = ["FastGRPOTrainer", "patch", "patched", "unpatch"]


def __getattr__(name: str) -> type:
    if name == "FastGRPOTrainer":
        from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

        return FastGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
