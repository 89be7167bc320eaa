"""vLLM on a GPU beside the trainer: memory given and taken back, in every way that weights get there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_fast.config import LoraConfig, ModelConfig
from grpo_fast.policy import load_policy
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm_config import VLLMConfig

pytestmark = pytest.mark.gpu

SAMPLING = Sampling(max_completion_length=20, seed=11)
PROMPTS = [(5, 6, 7), tuple(3 + i % 26 for i in range(140))]
CYCLES = 4
MIB = 2**20
# Settings, whether there is LoRA, the way of the weights and the sleep level that these lead to.
CASES: dict[str, tuple[dict[str, Any], bool, str, int]] = {
    "shared": ({}, False, "shared", 1),
    "copied": ({"share_weights": False}, False, "direct", 2),
    "kept": ({"share_weights": False, "sleep_level": 1}, False, "direct", 1),
    "merged": ({}, True, "direct", 2),
    "adapter": ({"lora_sync": "adapter"}, True, "adapter", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_cycles_give_the_memory_back_and_keep_sampler_and_policy_together(
    name, saved_model, shake, largest_difference
):
    pytest.importorskip("vllm")
    from grpo_fast.rollout.vllm import VLLMEngine

    settings, with_lora, way, level = CASES[name]
    lora = LoraConfig(r=8) if with_lora else None
    policy = load_policy(ModelConfig(path=str(saved_model()), dtype="bfloat16", device="cuda", lora=lora))
    config = VLLMConfig(kv_cache_gib=1.0, enforce_eager=True, **settings)

    with VLLMEngine(policy, config, max_length=256) as engine:
        assert (engine.sync_way, engine._cycle.level) == (way, level), engine.sync_reason
        asleep = []
        for _ in range(CYCLES):
            engine.generate(PROMPTS, 3, SAMPLING)
            awake = torch.cuda.mem_get_info()[0]
            engine.sleep()
            asleep.append(torch.cuda.mem_get_info()[0])
            assert asleep[-1] - awake > 900 * MIB  # the KV cache at least
            shake(policy)
            engine.sync(policy)
            engine.wake()
            groups = engine.generate(PROMPTS, 3, SAMPLING)
            assert largest_difference(policy, PROMPTS, groups) < 0.3
        assert asleep[0] - asleep[-1] < 64 * MIB  # nothing piles up
