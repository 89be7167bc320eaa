"""Replace Liger's fused GRPO loss by another import."""

import torch

from grpo_fast.integrations.liger import LigerFusedLinearGRPOLoss

torch.manual_seed(0)
batch, length, width, vocabulary = 4, 6, 32, 100
head = torch.nn.Linear(width, vocabulary, bias=False)
hidden = torch.randn(batch, length, width, requires_grad=True)  # predict the completions' tokens
completions = torch.randint(vocabulary, (batch, length))
mask = torch.arange(length) < torch.tensor([6, 3, 5, 1])[:, None]
advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])

grpo_loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", use_ref_model=True)
loss, (kl, clipped) = grpo_loss(
    hidden, head.weight, completions, mask, advantages, ref_per_token_logps=torch.full((batch, length), -4.6)
)
loss.backward()
norm = torch.nn.utils.clip_grad_norm_(head.parameters(), max_norm=1.0)
print(f"loss {loss:.4f}, KL {kl:.4f}, clipped {clipped:.0%}, |dW| {norm:.4f}")
