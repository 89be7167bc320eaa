"""Sharded weights on two ranks against whole ones: `python shard_worker.py FOLDER SEED`, models in FOLDER."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_samples
from fork import fork
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo_fast.distributed.config import DistributedConfig
from grpo_fast.distributed.shards import local, rows_of, whole
from grpo_fast.distributed.world import World
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.policy import PackedBatch, Policy, load_policy, pack
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.packing import empty_batch
from grpo_fast.rollout import Sampling, make_engine
from grpo_fast.rollout.config import RolloutConfig
from grpo_fast.update import packed_loss

CASES: list[tuple[str, dict[str, Any]]] = [
    ("phi", {}),  # whose head has a bias
    ("qwen2", {"lora": {"r": 3, "target_modules": ["embed_tokens", "v_proj"]}}),
    ("gpt2", {"lora": {"r": 3}}),
    ("gemma2", {"gradient_checkpointing": True}),
    ("granite", {"train_lm_head": False, "gradient_checkpointing": "mlp"}),
    ("qwen3_moe", {}),
]


def both(world: World, folder: Path, settings: dict[str, Any], head: str) -> tuple[Policy, Policy]:
    """Of whole weights and of sharded ones, equal and moved from what was loaded."""
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu", **settings)
    torch.manual_seed(0)  # of adapters
    alone = load_policy(config)
    torch.manual_seed(0)
    sharded = load_policy(config, world=world, distributed=DistributedConfig(mode="shard", head=head))
    with torch.no_grad():
        pairs = zip(alone.trainable().values(), sharded.trainable().values(), strict=True)
        for weight, rows in pairs:
            noise = 0.02 * torch.randn_like(weight)
            weight.add_(noise)
            local(rows).add_(rows_of(noise, world))
    return alone, sharded


def check_gradients(alone: Policy, sharded: Policy, world: World, seed: int) -> None:
    """Of two micro-batches, of which rank 0 computes one and a half, and of the loss for each token."""
    samples = make_samples(torch.Generator().manual_seed(seed))
    totals = StepTotals(sum(len(s.completion_ids) for s in samples), len(samples))
    parts = [samples[:5], samples[5:7], samples[7:]]
    one, half, other = (pack(part, max_tokens=1000, device="cpu")[0] for part in parts)
    ranks = [[one, half], [other, empty_batch("cpu", sampler_logprobs=True)]]

    def loss_of(policy: Policy, batch: PackedBatch) -> torch.Tensor:
        hidden, batch, own = policy.at_head(batch)
        out = packed_loss(policy.head, hidden, batch, GRPOLossConfig("gspo"), totals=totals)
        logprobs.append(out.logprobs[own])
        return out.loss

    found = []
    for policy, batches in ((alone, [one, half, other]), (sharded, ranks[world.rank])):
        logprobs: list[torch.Tensor] = []
        for batch in batches:
            policy.run(lambda batch=batch, policy=policy: loss_of(policy, batch)).backward()
        found.append(torch.cat(logprobs))
    ours = slice(0, -len(other.targets)) if world.rank == 0 else slice(-len(other.targets), None)
    torch.testing.assert_close(found[1], found[0][ours], rtol=1e-5, atol=1e-5)
    for (name, weight), rows in zip(alone.trainable().items(), sharded.trainable().values(), strict=True):
        assert isinstance(rows, DTensor) and (weight.grad is None) == (rows.grad is None), name
        if weight.grad is not None:
            scale = weight.grad.abs().max().item()
            torch.testing.assert_close(
                whole(rows.grad), weight.grad, rtol=0, atol=1e-5 * scale + 1e-7, msg=name
            )


def check_rows(alone: Policy, sharded: Policy) -> None:
    """Weights are whole while they are read, and one by one where all are asked for."""
    samples = make_samples(torch.Generator().manual_seed(0))
    (batch,) = pack(samples, max_tokens=1000, device="cpu")
    with torch.no_grad():
        sharded.run(lambda: sharded.hidden_states(batch), whole_head=True)
    assert all(isinstance(weight, DTensor) for weight in sharded.model.parameters())
    for (name, one), (same, two) in zip(alone.named_weights(), sharded.named_weights(), strict=True):
        assert name == same and torch.equal(one, two), (name, same)
    assert sharded.changing_weights() == alone.changing_weights()
    assert sharded.token_costs == alone.token_costs


def check_engine(alone: Policy, sharded: Policy, world: World, seed: int) -> None:
    """A sharded policy's engine draws what that of whole weights does, and is nothing while it sleeps."""
    drawn = random.Random(seed)
    prompts = [drawn.choices(range(61), k=drawn.randint(1, 9)) for _ in range(3 + world.rank)]
    sampling = Sampling(max_completion_length=8, seed=seed)
    config = RolloutConfig(engine="transformers")
    with make_engine(config, alone) as expected, make_engine(config, sharded, world=world) as engine:
        engine.sleep()
        freed = engine.freed()
        assert (
            freed >= sum(w.nbytes for w in alone.base_weights().values()) and not engine.memory()["weights"]
        )
        with pytest.raises(RuntimeError, match="sync"):
            engine.wake()
        with pytest.raises(ValueError, match="another policy"):
            engine.sync(alone)
        engine.sync(sharded)
        engine.wake()
        assert engine.memory()["weights"] == freed and not engine.freed()
        ours, theirs = (e.generate(prompts, 2, sampling) for e in (engine, expected))
        assert [[c.token_ids for c in group] for group in ours] == [
            [c.token_ids for c in group] for group in theirs
        ]


def main(world: World, folder: str, seed: str) -> None:
    drawn = random.Random(seed)
    for family, settings in CASES:
        torch.manual_seed(int(seed))
        head = drawn.choice(["gathered", "sharded"])
        print(family, head, flush=True)
        alone, sharded = both(world, Path(folder, family), settings, head)
        check_gradients(alone, sharded, world, int(seed))
        check_rows(alone, sharded)
        check_engine(alone, sharded, world, int(seed))
    sharded.save_pretrained(Path(folder, f"export{world.rank}"))
    if world.leads:
        exported = AutoModelForCausalLM.from_pretrained(Path(folder, "export0")).state_dict()
        for name, weight in alone.named_weights():
            assert torch.equal(exported[name], weight), name
    assert not Path(folder, "export1").exists()


if __name__ == "__main__":
    fork(main, 2, *sys.argv[1:])
