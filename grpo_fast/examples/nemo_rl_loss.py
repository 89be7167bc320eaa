"""Use our loss in NeMo-RL: in a run script, replace the `loss_fn` that `setup` returns."""

import torch

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.nemo_rl import PolicyLoss

loss_fn = PolicyLoss(GRPOLossConfig("cispo"))

# Its trainer calls the loss like this; here on random numbers, 4 samples of 10 tokens.
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
