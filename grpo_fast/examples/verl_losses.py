"""Use our head and our losses in verl.

A run needs only these overrides, not the code below:

actor_rollout_ref.model.external_lib=grpo_fast.integrations.verl
actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.actor.policy_loss.loss_mode=grpo_fast_dapo
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers.dense_common import CausalLMOutputForPPO, forward_with_torch_backend
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.import_utils import import_external_libs

import_external_libs("grpo_fast.integrations.verl")

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
)
ids = torch.LongTensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
out = forward_with_torch_backend(model, input_ids=ids, temperature=0.8, return_dict=True)
assert isinstance(out, CausalLMOutputForPPO)
print("log-probabilities and entropies, without logits:", out.log_probs, out.entropy)
print("the loss of loss_mode=grpo_fast_dapo:", get_policy_loss_fn("grpo_fast_dapo"))
