"""NeMo-RL with a loss of ours: in a run script, replace the `loss_fn` that `setup` returns by this one."""

import torch

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.nemo_rl import PolicyLoss

loss_fn = PolicyLoss(GRPOLossConfig("cispo"))

# What its trainer does with it, on random numbers: 4 samples of 10 tokens.
logprobs = torch.randn(4, 10).sub(3).clamp(max=0)
data = {
    "prev_logprobs": logprobs,
    "generation_logprobs": logprobs,
    "advantages": torch.randn(4, 1).expand(4, 10),
    "token_mask": (torch.arange(10) > 3).float().expand(4, 10),
    "sample_mask": torch.ones(4),
}
current = logprobs[:, 1:].clone().requires_grad_()
loss, metrics = loss_fn(
    next_token_logprobs=current,
    data=data,
    global_valid_seqs=torch.tensor(4.0),
    global_valid_toks=torch.tensor(24.0),
)
loss.backward()
print("loss", loss.item(), metrics)
