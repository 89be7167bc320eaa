"""One rank of `test_nemo_rl.py`: `python nemo_rl_worker.py STORE RANK`.

Each of two ranks holds half the positions and half the vocabulary, as Megatron's sequence parallelism does.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from host_stubs import stubbed

HEAVY = (
    *("ray", "tensordict", "megatron", "zmq", "pynvml", "mlflow", "swanlab", "wandb", "prometheus_client"),
    "hydra",
)


def main(store: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=500)
    )
    sys.modules["nemo_rl.models.policy"] = MagicMock()
    with stubbed(*HEAVY):
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
    torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def reduce_scatter(output, inputs, op, group) -> None:
    total = torch.stack(inputs)
    dist.all_reduce(total, op, group=group)
    output.copy_(total[dist.get_rank(group)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
