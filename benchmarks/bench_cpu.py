"""Losses and advantages at a CPU's size, by pytest-benchmark: see benchmarks/README.md."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import LOSS_TYPES

SEQUENCES, LENGTH, GROUP = 64, 128, 8
TOKENS = SEQUENCES * LENGTH


@pytest.mark.benchmark(group=f"policy loss, forward + backward, {TOKENS:,} tokens")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss(benchmark: BenchmarkFixture, loss_type: str) -> None:
    config = GRPOLossConfig(loss_type, max_completion_length=LENGTH)
    logprobs = -2 * torch.rand(TOKENS)
    old, sampler = (logprobs + 0.1 * torch.randn(2, TOKENS)).clamp(max=0)
    leaf = logprobs.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=leaf,
        advantages=torch.randn(SEQUENCES).repeat_interleave(LENGTH),
        sequence_ids=torch.arange(SEQUENCES).repeat_interleave(LENGTH),
        loss_mask=torch.rand(TOKENS) > 0.1,
        num_sequences=SEQUENCES,
        old_logprobs=old,
        sampler_logprobs=sampler,
    )

    benchmark(lambda: torch.autograd.grad(policy_loss(inputs, config).loss, leaf))


@pytest.mark.benchmark(group="advantages, 1,024 groups of 8")
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages(benchmark: BenchmarkFixture, scale_rewards: str) -> None:
    benchmark(group_advantages, torch.rand(1024, GROUP), scale_rewards=scale_rewards)
