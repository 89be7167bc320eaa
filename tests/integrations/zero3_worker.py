"""One of two processes under DeepSpeed ZeRO-3: `torchrun --nproc-per-node 2 zero3_worker.py STORE FOLDER`.

The head's weight is cut up between them, gathered while TRL scores, and again for the backward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from trl.trainer.utils import add_fused_lm_head

from grpo_fast.integrations.trl import patch
from grpo_fast.integrations.trl.patch import is_zero3_enabled

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def scored_model(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def loss_of(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Something of both outputs, the mean over the rows."""
    out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    return (-out.log_probs - 0.1 * out.entropy).sum() / len(ids)


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(60, (4, 9), generator=generator)
    labels = ids.masked_fill(torch.rand(4, 9, generator=generator) < 0.4, -100)
    whole = scored_model(folder)
    expected = loss_of(whole, ids, labels)
    expected.backward()

    settings = HfDeepSpeedConfig(CONFIG)  # from here on `from_pretrained` partitions; the name keeps it alive
    patch()
    model = scored_model(folder)
    engine, *_ = deepspeed.initialize(
        model=model, config=settings.config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert is_zero3_enabled() and model.lm_head.weight.numel() == 0
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    loss = loss_of(engine, ids[mine], labels[mine])
    engine.backward(loss)

    both = loss.detach().clone()
    dist.all_reduce(both)
    torch.testing.assert_close(both / 2, expected.detach(), rtol=1e-4, atol=1e-5)
    for (name, plain), partitioned in zip(whole.named_parameters(), model.parameters(), strict=True):
        found = deepspeed.utils.safe_get_full_grad(partitioned)
        torch.testing.assert_close(
            found, plain.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[2]))
    dist.destroy_process_group()
