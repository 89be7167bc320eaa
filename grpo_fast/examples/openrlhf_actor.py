"""Use OpenRLHF's actor without logits, and GSPO as its policy loss.

In a run, put the two lines of `patch` into a function, and start Ray with
`ray.init(runtime_env={"worker_process_setup_hook": that_function})` before `train_ppo_ray` does.
"""

import torch
from openrlhf.models import Actor, PolicyLoss
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.openrlhf import patch

patch(GRPOLossConfig("gspo"))

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
)
actor = Actor(model, temperature=0.8)
actor.packing_samples = False
ids, mask = torch.randint(0, 512, (2, 12)), torch.ones(2, 12, dtype=torch.long)
logprobs = actor(ids, mask[:, 6:], mask)
print("log-probabilities of the answers:", logprobs.shape)
loss, *_ = PolicyLoss()(logprobs, logprobs.detach(), torch.randn(2, 6), mask[:, 6:])
loss.backward()
