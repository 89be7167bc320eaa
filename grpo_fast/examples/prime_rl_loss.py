"""Use our head and one of our losses in prime-rl.

Save the part above the line as `my_module.py`, and name it in the trainer's TOML:

[loss]
type = "custom"
import_path = "my_module.loss"
"""

import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from grpo_fast.integrations.prime_rl import patch, policy_loss

patch()


def loss(inputs: LossInputs) -> LossOutputs:
    return policy_loss(inputs, loss_type="cispo", epsilon_high=4.0)


# ----------------------------------------------------------------------------------------------
logprobs = torch.randn(16).sub(3).clamp(max=0)
sample = LossInputs(
    trainer_logprobs=logprobs.clone().requires_grad_(),
    inference_logprobs=logprobs,
    ref_logprobs=None,
    advantages=torch.randn(1).expand(16),
    loss_mask=torch.arange(16) > 5,
)
print("loss", loss(sample))
