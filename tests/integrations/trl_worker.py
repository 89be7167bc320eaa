"""Two ranks: `python trl_worker.py STORE MODEL_FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import two_ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from benchmarks.trainers import words_task
from benchmarks.trl_side_by_side import Setting, differences, train
from grpo_fast.integrations.host_loss import HostLoss
from grpo_fast.integrations.trl import FastGRPOTrainer
from grpo_fast.integrations.trl.trainer import LossAtHead, add_loss_to_forward, step_scale

RECIPE = {"beta": 0.1, "max_completion_length": 6, "epsilon_low": 0.1, "epsilon_high": 0.2}


def ddp(folder: Path) -> None:
    """Completions of unequal lengths on the two ranks; TRL counts their tokens over both."""
    options = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "num_generations": 2}
    setting = Setting("dapo", options=options)
    theirs, ours = (
        train(setting, kind, words_task(folder), steps=3) for kind in (GRPOTrainer, FastGRPOTrainer)
    )
    assert dist.get_world_size() == 2
    if dist.get_rank() == 0:
        gaps = differences(theirs.history, ours.history)
        worst = max(gaps, key=gaps.__getitem__)
        assert len(ours.history) == 3
        assert gaps[worst] < 2e-5, (worst, gaps[worst])


def batch() -> dict[str, Any]:
    """Four completions of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(5)
    mask = (torch.arange(6) < torch.tensor([6, 2, 1, 5])[:, None]).long()
    return {
        "prompt_ids": torch.randint(60, (4, 3), generator=generator),
        "prompt_mask": torch.ones(4, 3, dtype=torch.int64),
        "completion_ids": torch.randint(60, (4, 6), generator=generator),
        "completion_mask": mask,
        "advantages": torch.randn(4, generator=generator),
        "old_per_token_logps": 0.3 * torch.randn(4, 6, generator=generator) - 5,
        "ref_per_token_logps": 0.3 * torch.randn(4, 6, generator=generator) - 5,
        "num_items_in_batch": mask.sum(),
    }


def loss_of(model: torch.nn.Module, inputs: dict[str, Any], processes: int) -> Tensor:
    scale = step_scale("dapo", inputs, processes, accumulated=1, generated=1)
    head = LossAtHead(inputs, HostLoss.of("dapo", "token", **RECIPE), scale)
    return model(
        input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        labels=head.labels(),
        fused_lm_head=True,
        loss_at_head=head,
    ).loss


def fsdp2(folder: Path) -> None:
    """Two sharded halves of a batch give the gradients of the whole one."""
    whole, half = batch(), slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    models = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(folder)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        add_loss_to_forward(model)
        models.append(model)
    plain, sharded = models
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert isinstance(sharded.lm_head.weight, DTensor)

    loss_of(plain, whole, processes=1).backward()
    mine = {name: value[half] if value.dim() else value for name, value in whole.items()}
    loss_of(sharded, mine, processes=2).backward()

    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad.full_tensor(),
            expected.grad,
            rtol=1e-3,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def main(rank: int, folder: Path) -> None:
    fsdp2(folder)
    ddp(folder)


if __name__ == "__main__":
    two_ranks.run(main, Path(sys.argv[2]))
