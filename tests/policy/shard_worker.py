"""Sharded weights of four models on two ranks against whole ones: `python shard_worker.py FOLDER SEED`."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import make_samples, save_model
from fork import fork
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.policy import ModelConfig, OptimizerConfig
from grpo_fast.config.rollout import RolloutConfig
from grpo_fast.distributed.shards import local, rows_of, whole
from grpo_fast.distributed.world import SINGLE_PROCESS
from grpo_fast.loop.update import packed_loss
from grpo_fast.objective import GRPOLossConfig, StepTotals
from grpo_fast.policy import PolicyOptimizer, layers, load_policy, pack
from grpo_fast.policy.packing import empty_batch
from grpo_fast.rollout import Sampling, make_engine

CASES = [
    ("phi", {}),  # whose head has a bias
    ("qwen2", {"lora": {"r": 3, "target_modules": ["embed_tokens", "v_proj"]}}),
    ("gemma2", {"gradient_checkpointing": True}),
    ("granite", {"train_lm_head": False, "gradient_checkpointing": "mlp"}),
    ("qwen3_moe", {"router_aux_loss": 0.5}),
    ("qwen3_5_text", {}),
    ("phi", {"packing": "none"}),
    ("qwen3_moe", {"lora": {"r": 3}, "gradient_checkpointing": True}),
    ("qwen2", {"dtype": "bfloat16"}),
]


def loaded(path, settings, world):
    """Moved from what it was loaded as, by the same everywhere."""
    torch.manual_seed(0)  # of adapters and the move
    config = ModelConfig.model_validate({"path": str(path), "dtype": "float32", "device": "cpu"} | settings)
    policy = load_policy(config, world=world, distributed=DistributedConfig(mode="shard"))
    with torch.no_grad():
        for weight in policy.trainable().values():
            local(weight).add_(rows_of(0.02 * torch.randn(weight.shape, dtype=weight.dtype), world))
    return policy


def check_rows(alone, sharded, batch):
    """Weights are whole while they are read, and one by one where all are asked for."""
    with torch.no_grad():
        sharded.run(lambda: sharded.hidden_states(batch))
    assert all(isinstance(weight, DTensor) for weight in sharded.model.parameters())
    for (name, one), (same, two) in zip(alone.named_weights(), sharded.named_weights(), strict=True):
        assert name == same and torch.equal(one, two), (name, same)
    assert sharded.changing_weights() == alone.changing_weights()
    assert sharded.token_costs == alone.token_costs


def check_engine(alone, sharded, world, seed):
    """A sharded policy's engine draws what that of whole weights does, and holds nothing while it sleeps."""
    drawn = random.Random(seed)
    prompts = [drawn.choices(range(61), k=drawn.randint(1, 9)) for _ in range(3 + world.rank)]
    sampling, config = Sampling(max_completion_length=8, seed=seed), RolloutConfig(engine="transformers")
    with make_engine(config, alone) as expected, make_engine(config, sharded, world=world) as engine:
        engine.sleep()
        assert engine.freed() == sum(weight.nbytes for weight in alone.base_weights().values())
        with pytest.raises(RuntimeError, match="sync"):
            engine.wake()
        with pytest.raises(ValueError, match="another policy"):
            engine.sync(alone)
        engine.sync(sharded)
        engine.wake()
        assert engine.freed() == 0
        ours, theirs = (
            [[c.token_ids for c in group] for group in e.generate(prompts, 2, sampling)]
            for e in (engine, expected)
        )
        assert ours == theirs


def check_step(alone, sharded, world, seed, tolerance):
    """Rank 0 computes two micro-batches, rank 1 one and an empty one; the moment shows the gradient."""
    samples = make_samples(torch.Generator().manual_seed(seed))
    totals = StepTotals(len(samples.token_ids), len(samples))
    parts = [samples[:5], samples[5:7], samples[7:]]
    batches = [pack(part, max_tokens=1000, device="cpu", shares_prompts=alone.packs)[0] for part in parts]
    check_rows(alone, sharded, batches[0])
    own = [batches[2], empty_batch(samples, "cpu")] if world.rank else batches[:2]

    def loss_of(policy, optimizer, batch):
        out = packed_loss(policy, batch, GRPOLossConfig("gspo"), totals=totals, optimizer=optimizer)
        logprobs.append(out.logprobs)
        return out.loss

    found = []
    for policy, ranks, work in ((alone, SINGLE_PROCESS, batches), (sharded, world, own)):
        logprobs = []
        optimizer = PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=1, world=ranks)
        for batch in work:
            policy.run(partial(loss_of, policy, optimizer, batch)).backward()
        optimizer.step()
        state = {name: whole(tensor) for name, tensor in optimizer.state_tensors().items()}
        found.append((torch.cat(logprobs), state))
        for name, weight in policy.trainable().items():
            assert torch.equal(whole(weight), state[f"master.{name}"].to(weight.dtype)), name
    (expected, moments), (logprobs_here, same) = found
    of_rank_1 = len(batches[2].targets)
    ours = expected[-of_rank_1:] if world.rank else expected[:-of_rank_1]
    torch.testing.assert_close(logprobs_here, ours, rtol=0, atol=tolerance)
    assert moments.keys() == same.keys()
    for name, moment in moments.items():
        if name.startswith("exp_avg."):
            error = (same[name] - moment).norm()
            assert error <= tolerance * moment.norm() + 1e-7, (name, error)


def main(world, folder, seed):
    drawn = random.Random(seed)
    torch.manual_seed(int(seed))
    layers.TILE_TOKENS = drawn.randint(2, 9)
    for family, settings in [*drawn.sample(CASES[:-1], 2), CASES[-1]]:
        print(family, settings, flush=True)
        alone, sharded = (loaded(Path(folder, family), settings, ranks) for ranks in (SINGLE_PROCESS, world))
        check_engine(alone, sharded, world, int(seed))
        check_step(alone, sharded, world, int(seed), 1e-5 if "dtype" not in settings else 0.05)
    sharded.save_pretrained(Path(folder, f"export{world.rank}"))
    weights = dict(sharded.named_weights())
    if world.is_main:
        exported = AutoModelForCausalLM.from_pretrained(Path(folder, "export0")).state_dict()
        assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    assert not Path(folder, "export1").exists()


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[2]))
    for name in dict(CASES):
        save_model(Path(sys.argv[1], name), name)
    fork(main, 2, *sys.argv[1:])
