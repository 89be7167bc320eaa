"""Two ranks with a gloo group: `python two_ranks.py STORE MODEL_FOLDER CHECK...`, functions of this file.

One process imports what takes seconds, and forks.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_stubs import SOURCES, importable, with_gradients
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from grpo_fast.integrations.huggingface import patch_causal_lm

CLOSE = {"rtol": 1e-3, "atol": 1e-6}


def huggingface(rank: int, folder: Path) -> None:
    """Each rank has half a batch and the normalizer of the whole; its gradients add up to those of one."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(2, 61, (4, 8))
    labels = ids.masked_fill(torch.rand(4, 8) < 0.3, -100)
    labels[2:] = torch.where(torch.arange(8) < 6, -100, labels[2:])  # the ranks hold different counts
    items = (labels[:, 1:] != -100).sum()
    reference, rows = copy.deepcopy(model), slice(2 * rank, 2 * rank + 2)
    reference(ids, labels=labels, num_items_in_batch=items).loss.backward()

    for parallel in ("ddp", "fsdp2"):
        patched = patch_causal_lm(copy.deepcopy(model))
        if parallel == "ddp":
            wrapped: nn.Module = DistributedDataParallel(patched)  # reduces only while it is alive
        else:
            # The head as a unit of its own: its weight is whole only while the head module itself is called.
            wrapped = sharded(patched, *patched.model.layers, patched.lm_head)
        output = wrapped(input_ids=ids[rows], labels=labels[rows], num_items_in_batch=items)
        output.loss.backward()
        assert output.logits is None
        assert_gradients(patched, reference, scale=2)


def trl(rank: int, folder: Path) -> None:
    """Completions of unequal lengths on the ranks; TRL counts their tokens over both."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head
    from words import assert_same_history, train_words

    from grpo_fast import GRPOLossConfig
    from grpo_fast.integrations.trl import FastGRPOTrainer
    from grpo_fast.integrations.trl.trainer import LossAtHead, add_loss_to_forward, step_scale

    def trained_model(inputs: dict[str, Any], processes: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder)
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        add_loss_to_forward(model)
        wrapped = sharded(model, *model.model.layers) if processes > 1 else model
        scale = step_scale("dapo", inputs, processes, accumulated=1, generated=1)
        head = LossAtHead(inputs, GRPOLossConfig("dapo", epsilon_low=0.1), scale)
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        labels = nn.functional.pad(ids.masked_fill(mask == 0, -100), (1, 0), value=-100)
        forward = head.forward_of(wrapped)
        ids = nn.functional.pad(ids, (1, 0), value=5)  # a prompt of one token
        forward(input_ids=ids, labels=labels, fused_lm_head=True).loss.backward()
        return model

    mask = (torch.arange(6) < torch.tensor([6, 2, 1, 5])[:, None]).long()
    whole = {
        "completion_ids": torch.randint(60, (4, 6)),
        "completion_mask": mask,
        "advantages": torch.randn(4),
    }
    whole |= {"old_per_token_logps": 0.3 * torch.randn(4, 6) - 5, "num_items_in_batch": mask.sum()}
    mine = {name: value.chunk(2)[rank] if value.dim() else value for name, value in whole.items()}
    halves = trained_model(mine, processes=2)
    assert isinstance(halves.lm_head.weight, DTensor)
    assert_gradients(halves, trained_model(whole, processes=1))

    options = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "num_generations": 2}
    kinds = GRPOTrainer, FastGRPOTrainer
    theirs, ours = (train_words(kind, folder, "dapo", steps=1, **options) for kind in kinds)
    if rank == 0:
        assert_same_history(ours, theirs)


def verl(rank: int, folder: Path) -> None:
    """Half the vocabulary on each rank."""
    from verl.utils.kernel import linear_cross_entropy as kernel

    import grpo_fast.integrations.verl  # noqa: F401

    hidden = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 40, (5, 3))
    shard = weight.detach().chunk(2)[rank].clone().requires_grad_()
    copied = hidden.detach().clone().requires_grad_()

    def results(rows: Tensor, head: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
        return with_gradients(
            kernel.linear_cross_entropy(rows, head, labels, 0.9, "none", group), (rows, head)
        )

    *expected, d_weight = results(hidden, weight, None)
    found = results(copied, shard, dist.group.WORLD)
    dist.all_reduce(found[2])  # what Megatron's sequence-parallel gather does in its backward
    torch.testing.assert_close(found, [*expected, d_weight.chunk(2)[rank]])


def nemo_rl(rank: int, folder: Path) -> None:
    """Half the positions and half the vocabulary on each rank, as Megatron's sequence parallelism has it."""
    from nemo_rl.distributed import model_utils

    from grpo_fast.integrations import nemo_rl as adapter

    hidden, weight, target = torch.randn(8, 3, 16), torch.randn(40, 16), torch.randint(0, 40, (3, 8))
    signature = inspect.signature(model_utils.from_parallel_hidden_states_to_logprobs)
    two_weights = "output_weight" in signature.parameters  # 0.6's, which cannot do with that of a tied layer

    def results(tied: bool = False) -> list[Tensor]:
        part, shard = (tensor.chunk(2)[rank].clone().requires_grad_() for tensor in (hidden, weight))
        weights = [None if tied else shard, shard] if two_weights else [shard]
        options = {"vocab_start_index": 20 * rank, "vocab_end_index": 20 * rank + 20, "chunk_size": 3}
        logprobs = model_utils.from_parallel_hidden_states_to_logprobs(
            part, *weights, None, target, tp_group=dist.group.WORLD, **options
        )
        return with_gradients([logprobs], (part, shard))

    def reduce_scatter(output: Tensor, inputs: list[Tensor], op: Any, group: Any) -> None:
        total = torch.stack(inputs)
        dist.all_reduce(total, op, group=group)
        output.copy_(total[dist.get_rank(group)])

    # Gloo has no reduce-scatter, which theirs uses; it is the sum, then one's own part.
    dist.reduce_scatter = reduce_scatter
    expected = results()
    adapter.patch()
    assert model_utils.from_parallel_hidden_states_to_logprobs.__module__ == adapter.__name__
    torch.testing.assert_close(results(tied=True), expected, rtol=1e-4, atol=1e-5)


def sharded(model: nn.Module, *units: nn.Module) -> nn.Module:
    for module in (*units, model):
        fully_shard(module)
    return model


def assert_gradients(model: nn.Module, reference: nn.Module, scale: float = 1.0) -> None:
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        torch.testing.assert_close(
            scale * gradient, expected.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def main(rank: int, store: str, folder: str, *checks: str) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= ranks  # which Accelerate reads
    timeout = timedelta(seconds=500)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    for check in checks:
        torch.manual_seed(3)
        with importable(check) if check in SOURCES else nullcontext():
            globals()[check](rank, Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "trl" in sys.argv:
        import grpo_fast.integrations.trl.trainer  # noqa: F401
    torch.multiprocessing.start_processes(main, args=tuple(sys.argv[1:]), nprocs=2, start_method="fork")
