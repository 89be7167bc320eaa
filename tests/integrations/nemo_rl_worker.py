"""Two ranks with half the positions and half the vocabulary each: `python nemo_rl_worker.py STORE`.

So does Megatron's sequence parallelism hand them to the head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import two_ranks
from host_stubs import importable


def main(rank: int) -> None:
    from nemo_rl.distributed import model_utils

    from grpo_fast.integrations import nemo_rl as adapter

    torch.manual_seed(7)
    hidden, weight = torch.randn(8, 3, 16), torch.randn(40, 16)
    target = torch.randint(0, 40, (3, 8))
    scale = torch.linspace(-1, 2, 21).view(3, 7)
    # Gloo has no reduce-scatter, which theirs uses; it is the sum, then one's own part.
    dist.reduce_scatter = reduce_scatter

    def results() -> list[torch.Tensor]:
        part = hidden[4 * rank : 4 * rank + 4].clone().requires_grad_()
        shard = weight[20 * rank : 20 * rank + 20].clone().requires_grad_()
        logprobs = model_utils.from_parallel_hidden_states_to_logprobs(
            part, shard, None, target, 20 * rank, 20 * rank + 20, dist.group.WORLD, chunk_size=3
        )
        return [logprobs, *torch.autograd.grad((scale * logprobs).sum(), (part, shard))]

    expected = results()
    adapter.patch()
    adapted = model_utils.from_parallel_hidden_states_to_logprobs
    assert adapted is adapter.hidden_states_to_logprobs
    torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-5)


def reduce_scatter(output, inputs, op, group) -> None:
    total = torch.stack(inputs)
    dist.all_reduce(total, op, group=group)
    output.copy_(total[dist.get_rank(group)])


if __name__ == "__main__":
    with importable("nemo_rl"):
        two_ranks.run(main)
