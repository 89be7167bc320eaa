"""Two ranks: `python huggingface_worker.py STORE`.

Each of two ranks holds its half of a batch and the normaliser of the whole; gradients averaged over ranks,
times two, must be those of one process with full logits.
"""

from __future__ import annotations

import copy

import torch
import two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_fast.integrations.huggingface import patch_causal_lm


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 61, (4, 8))
    labels = ids.masked_fill(torch.rand(4, 8) < 0.3, -100)
    labels[2:] = torch.where(torch.arange(8) < 6, -100, labels[2:])  # the ranks hold different counts
    return ids, labels


def wrapped(model: nn.Module, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    # The head as a unit of its own: its weight is whole only while the head module itself is called.
    for module in (*model.model.layers, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    return model


def main(rank: int) -> None:
    torch.manual_seed(3)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    ids, labels = batch()
    items = (labels[:, 1:] != -100).sum()
    model = copy.deepcopy(reference)
    reference(ids, labels=labels, num_items_in_batch=items).loss.backward()
    rows = slice(2 * rank, 2 * rank + 2)

    for parallel in ("ddp", "fsdp2"):
        patched = patch_causal_lm(copy.deepcopy(model))
        parallelised = wrapped(patched, parallel)  # DDP reduces only while it is alive
        output = parallelised(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=items)
        output.loss.backward()

        assert output.logits is None
        for (name, found), expected in zip(patched.named_parameters(), reference.parameters(), strict=True):
            gradient = found.grad.full_tensor() if parallel == "fsdp2" else found.grad
            torch.testing.assert_close(
                2 * gradient,
                expected.grad,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=f"{parallel} {name}": f"{n}: {m}",
            )


if __name__ == "__main__":
    two_ranks.run(main)
