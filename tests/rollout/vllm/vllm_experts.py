"""Routed experts from vLLM on a CPU: `TRITON_INTERPRET=1 python vllm_experts.py MODEL_FOLDER`.

vLLM's build for a CPU has no Triton, which routed experts need. Triton's interpreter replaces it, under the
name of a backend that the build looks for.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from unittest.mock import patch

import torch
from triton.backends import backends

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.data.table import EXPERTS, CompletionTable
from grpo_fast.loop.annotate import Annotator
from grpo_fast.policy import load_policy
from grpo_fast.policy.experts import expert_blocks
from grpo_fast.policy.routing import recorded
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm import settings
from grpo_fast.rollout.vllm.engine import VLLMEngine
from grpo_fast.rollout.vllm.weights import WeightSync

ROUNDING = 1e-3
PROMPTS = [[3 + i % 20 for i in range(40)], [5, 6, 7], [3 + i % 20 for i in range(35)]]


def main(folder: str) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    policy = load_policy(ModelConfig(path=folder, dtype="float32", device="cpu"), router_replay=True)
    config, reload = VLLMConfig(kv_cache_gib=0.05), WeightSync._reload

    def packing_again(sync: WeightSync) -> None:
        """Without a kernel vLLM packs the experts again; with one it would not, so it refuses them."""
        for module in sync._engine.model_executor.driver_worker.worker.get_model().modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
        reload(sync)

    with (
        patch.object(settings, "has_experts", lambda policy: False),
        patch.object(WeightSync, "_reload", packing_again),
        VLLMEngine(policy, config, max_length=128, tells_experts=True) as engine,
    ):
        for again in (False, True):  # after a sync, whose prompts are read anew
            if again:
                with torch.no_grad():
                    for weight in policy.trainable().values():
                        weight += 0.05 * torch.randn_like(weight)
                engine.sync(policy)
            compare(policy, engine.generate(PROMPTS, 2, Sampling(max_completion_length=10, seed=5)))


def compare(policy, groups) -> None:
    flat = [(prompt, c) for prompt, group in zip(PROMPTS, groups, strict=True) for c in group]
    table = CompletionTable.of(
        [prompt for prompt, _ in flat],
        [c.token_ids for _, c in flat],
        inputs={EXPERTS: [c.experts for _, c in flat]},
        sampler_logprobs=[c.logprobs for _, c in flat],
    )
    annotator = Annotator(policy, micro_batch_tokens=10_000)
    with recorded(policy.base_model) as take:
        (logprobs,) = annotator.columns(table)
        (replayed,) = take()
        annotator.columns(CompletionTable.of([p for p, _ in flat], [c.token_ids for _, c in flat]))
        (alone,) = take()
    (batch,) = annotator.packed(table)
    given = table.inputs[EXPERTS][batch.input_index]
    assert (logprobs - table.columns["sampler_logprobs"]).abs().mean() < ROUNDING
    assert torch.equal(replayed.sort(-1).values, given.sort(-1).values)
    differ = (alone.sort(-1).values != given.sort(-1).values).any(-1).float().mean()
    assert differ < 0.01, differ  # float32 on both sides: the same tokens in the same order
    router = next(iter(expert_blocks(policy.base_model).values())).gate.weight
    with torch.no_grad():
        before = router.clone()
        router.copy_(torch.randn_like(router))
        with recorded(policy.base_model) as take:
            annotator.columns(table)
            assert torch.equal(take()[0].sort(-1).values, given.sort(-1).values)
        router.copy_(before)


if __name__ == "__main__":
    main(sys.argv[1])
