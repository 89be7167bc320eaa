"""The head's gradient, added in place or brought by autograd: the model's gradient is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.plan.measure import random_batches, random_policy
from grpo_fast.plan.setup import Workload
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer
from grpo_fast.policy.config import LoraConfig, ModelConfig, OptimizerConfig
from grpo_fast.update import packed_loss

WORK = Workload(prompts=3, generations=2, prompt_length=6, completion_length=5, micro_batch_tokens=20)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def seed() -> int:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return seed


def make(seed: int, *, tied: bool, **model: Any) -> tuple[Policy, PolicyOptimizer]:
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    policy = random_policy(
        config, ModelConfig(path="-", **model), attention="sdpa", device=torch.device("cpu")
    )
    return policy, PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=1)


def gradients(
    policy: Policy, optimizer: PolicyOptimizer, batches: list[PackedBatch], *, in_place: bool
) -> dict[str, torch.Tensor]:
    """What the optimiser would step by."""
    optimizer.zero_grad()
    head = policy.head
    for batch in batches:
        into = optimizer.gradient_of(head.weight) if in_place else None
        packed_loss(head, policy.hidden_states(batch), batch, weight_grad=into).loss.backward()
    return {name: optimizer.gradient_of(p).clone() for name, p in policy.trainable().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_whole_models_gradient_is_that_of_autograd(seed: int, tied: bool, dtype: str) -> None:
    policy, optimizer = make(seed, tied=tied, dtype=dtype)
    batches = random_batches(policy, WORK)
    assert len(batches) > 1

    found = gradients(policy, optimizer, batches, in_place=True)

    expected = gradients(policy, optimizer, batches, in_place=False)
    parts = [gradients(policy, optimizer, [batch], in_place=False) for batch in batches]
    (head,) = (name for name, p in policy.trainable().items() if p is policy.head.weight)
    assert found[head].norm() > 0
    for name, gradient in expected.items():
        if name != head:
            assert torch.equal(found[name], gradient), name
    # Each of a micro-batch's gradients of the head is rounded, in 16 bits up to three times.
    rounding = 4 * torch.finfo(getattr(torch, dtype)).eps
    assert (found[head] - expected[head]).norm() <= rounding * sum(part[head].norm() for part in parts)


def test_a_frozen_head_has_no_gradient_to_add_to(seed: int) -> None:
    for model in ({"lora": LoraConfig(r=4)}, {"train_lm_head": False}):
        policy, optimizer = make(seed, tied=False, **model)

        assert optimizer.gradient_of(policy.head.weight) is None
