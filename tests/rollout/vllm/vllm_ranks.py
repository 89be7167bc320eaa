"""Two ranks with vLLM: `python vllm_ranks.py MODEL_FOLDER`. One process imports, and forks."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import largest_difference
from fork import fork

from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import MemoryConfig, RolloutConfig, VLLMConfig
from grpo_fast.distributed.shards import local
from grpo_fast.distributed.world import RankError, World
from grpo_fast.policy import Policy, load_policy
from grpo_fast.rollout import Sampling, make_engine
from grpo_fast.rollout.handover import PARTS, DeviceHandover

ROUNDING = 1e-3
SAMPLING = Sampling(max_completion_length=20, seed=11)


@torch.no_grad()
def difference(plain: Policy, policy: Policy, *completions: Any) -> float:
    """Return the difference from `plain` with the policy's weights; ranks have different prompts."""
    for name, weight in policy.named_weights():
        plain.base_weights()[name].copy_(weight)
    return largest_difference(plain, *completions)


def main(world: World, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank, optimizer = world.rank, SimpleNamespace(gradient_buffers=dict, keep_on_host=print)
    model = ModelConfig(path=folder, dtype="float32", device="cpu")
    prompts, plain, sampled = [[5, 6, 7 + rank], [8, 9, 10, 11]][rank:], load_policy(model), []
    for mode, parallel in (("replicate", 1), ("shard", 2)):
        distributed = DistributedConfig(mode=mode)
        policy = load_policy(model, world=world, distributed=distributed)
        settings = VLLMConfig(kv_cache_gib=0.05, tensor_parallel_size=parallel)
        config = RolloutConfig(engine="vllm", vllm=settings)
        with make_engine(config, policy, max_length=64, world=world) as engine:
            before = engine.generate(prompts, 3, SAMPLING)
            assert difference(plain, policy, prompts, before) < ROUNDING
            sampled.append([[completion.token_ids for completion in group] for group in before])
            torch.manual_seed(parallel)
            for parameter in policy.trainable().values():
                rows = local(parameter).detach()
                rows += 0.05 * torch.randn_like(rows)
            handover = DeviceHandover(engine, policy, optimizer, MemoryConfig())
            if rank == 1:
                fails_once = itertools.chain(
                    [torch.OutOfMemoryError("out of memory")], itertools.repeat(DEFAULT)
                )
                place, name = (engine._cycle, "wake") if mode == "shard" else (engine, "_sync")
                setattr(place, name, Mock(wraps=getattr(place, name), side_effect=fails_once, adapter=None))
            handover.to_engine()  # by both ranks twice
            assert handover.away == {*PARTS}
            after = engine.generate(prompts, 3, SAMPLING)
            assert [len(group) for group in after] == [3] * len(prompts)
            assert difference(plain, policy, prompts, after) < ROUNDING
            assert difference(plain, policy, prompts, before) > 10 * ROUNDING
            with pytest.raises(RankError if rank else ValueError, match=r"prompts\[0\] has no tokens"):
                engine.generate([] if rank else [()], 1, SAMPLING)
        assert world.sum(torch.ones(())) == 2
    assert sampled[0] == sampled[1]  # seeds do not depend on other ranks


if __name__ == "__main__":
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner  # noqa: F401  what takes seconds
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    # Ranks that disagree on its name go without shared memory, which no process would remove from /dev/shm.
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: str(communicator.rank))
    gc.collect = lambda generation=2: 0  # most of a start's and a stop's time
    fork(main, 2, sys.argv[1])
