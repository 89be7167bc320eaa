"""TRL's trainers on our head.

`patch()` computes the fused LM head of GRPO, RLOO, DPO, KTO and SFT by `linear_logprob`. `FastGRPOTrainer`, a
`trl.GRPOTrainer`, also computes the loss. It is imported on first use, since it loads TRL's trainers.
"""

from grpo_fast.config.lookup import lazy_names
from grpo_fast.integrations.trl.patch import patch, patched, unpatch

__all__ = ["FastGRPOTrainer", "patch", "patched", "unpatch"]
__getattr__ = lazy_names(__name__, {"trainer": ("FastGRPOTrainer",)})
