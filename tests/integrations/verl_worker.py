"""Two ranks with half the vocabulary each: `python verl_worker.py STORE`."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
import two_ranks
from host_stubs import importable


def main(rank: int, kernel: ModuleType) -> None:
    torch.manual_seed(11)
    hidden = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 40, (5, 3))
    mine = slice(20 * rank, 20 * rank + 20)
    shard = weight.detach()[mine].clone().requires_grad_()
    copy = hidden.detach().clone().requires_grad_()

    def results(
        rows: torch.Tensor, head: torch.Tensor, group: dist.ProcessGroup | None
    ) -> list[torch.Tensor]:
        logprobs, entropy = kernel.linear_cross_entropy(rows, head, labels, 0.9, "none", group)
        scale = torch.linspace(-1, 2, 15, dtype=torch.float64)
        loss = (scale * logprobs + 0.3 * entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (rows, head))]

    logprobs, entropy, d_hidden, d_weight = results(hidden, weight, None)
    found = results(copy, shard, dist.group.WORLD)
    dist.all_reduce(found[2])  # what Megatron's sequence-parallel gather does in its backward
    torch.testing.assert_close(found, [logprobs, entropy, d_hidden, d_weight[mine]])


if __name__ == "__main__":
    with importable("verl"):
        from verl.utils.kernel import linear_cross_entropy

        import grpo_fast.integrations.verl  # noqa: F401

        two_ranks.run(main, linear_cross_entropy)
