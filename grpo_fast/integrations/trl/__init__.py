"""TRL's trainers on our head.

`patch()` puts `linear_logprob` under the fused LM head of GRPO, RLOO, DPO, KTO and SFT. `FastGRPOTrainer`, a
`trl.GRPOTrainer`, goes further; it is looked up on first use, since it loads TRL's trainers.

Raises:
    ImportError: TRL is missing, or of a version whose fused LM head is not known.
"""

from grpo_fast.config.lookup import lazy_names
from grpo_fast.integrations.trl.patch import patch, patched, unpatch

__all__ = ["FastGRPOTrainer", "patch", "patched", "unpatch"]
__getattr__ = lazy_names(__name__, {"trainer": ("FastGRPOTrainer",)})
