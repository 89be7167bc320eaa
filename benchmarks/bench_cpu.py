"""At a CPU's size, by pytest-benchmark: the head of every implementation, losses, advantages, packing.

`pytest benchmarks --benchmark-only`.
"""

from __future__ import annotations

import random

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.accuracy import consult, is_wrong
from benchmarks.peers import Peer, Unsupported, all_peers
from benchmarks.problem import MODES, Outcome, Setting
from benchmarks.rows import Sources, make_problem
from benchmarks.tables import label
from grpo_fast.groups.advantages import group_advantages
from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.catalog import LOSS_TYPES
from grpo_fast.policy.packing import Sample, pack

SEQUENCES, LENGTH, GROUP = 64, 128, 8
TOKENS = SEQUENCES * LENGTH


@pytest.mark.parametrize("peer", all_peers(), ids=lambda peer: peer.name)
@pytest.mark.parametrize("mode", MODES)
def test_head(benchmark: BenchmarkFixture, peer: Peer, mode: str) -> None:
    setting = Setting("peaked", 256, 128, 4096, mode, True, "float32")
    problem = make_problem(setting, Sources(), torch.device("cpu"), seed=0)
    try:
        run = peer.prepare(problem)
    except (ImportError, Unsupported) as reason:
        pytest.skip(f"{peer.name}: {reason}")

    def once() -> Outcome:
        problem.clear()
        with torch.set_grad_enabled(problem.backward):
            return run()

    accuracy = consult(problem).judge(problem, once())
    assert not is_wrong(accuracy), accuracy
    benchmark.group = label(vars(setting))
    benchmark.extra_info |= accuracy
    benchmark(once)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.benchmark(group=f"policy loss, forward + backward, {TOKENS:,} tokens")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss(benchmark: BenchmarkFixture, loss_type: str, generator: torch.Generator) -> None:
    config = GRPOLossConfig(loss_type, max_completion_length=LENGTH)
    logprobs = -2 * torch.rand(TOKENS, generator=generator)
    shift = 0.1 * torch.randn(2, TOKENS, generator=generator)
    old, sampler = (logprobs + shift).clamp(max=0)
    leaf = logprobs.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=leaf,
        advantages=torch.randn(SEQUENCES, generator=generator).repeat_interleave(LENGTH),
        sequence_ids=torch.arange(SEQUENCES).repeat_interleave(LENGTH),
        loss_mask=torch.rand(TOKENS, generator=generator) > 0.1,
        num_sequences=SEQUENCES,
        old_logprobs=old,
        sampler_logprobs=sampler,
    )

    def once() -> None:
        leaf.grad = None
        policy_loss(inputs, config).loss.backward()

    benchmark(once)
    assert leaf.grad.isfinite().all()


@pytest.mark.benchmark(group="advantages, 1,024 groups of 8")
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages(benchmark: BenchmarkFixture, scale_rewards: str, generator: torch.Generator) -> None:
    rewards = torch.rand(1024, GROUP, generator=generator)

    found = benchmark(group_advantages, rewards, scale_rewards=scale_rewards)

    assert found.advantages.shape == rewards.shape


@pytest.mark.benchmark(group=f"packing, {SEQUENCES} completions of up to {LENGTH} tokens")
@pytest.mark.parametrize("share_prompts", [False, True], ids=["prompts apart", "prompts shared"])
def test_packing(benchmark: BenchmarkFixture, share_prompts: bool) -> None:
    samples = _samples(random.Random(0))

    batches = benchmark(pack, samples, max_tokens=2048, share_prompts=share_prompts, device="cpu")

    assert sum(len(batch.targets) for batch in batches) == sum(len(s.completion_ids) for s in samples)


def _samples(chance: random.Random) -> list[Sample]:
    """Groups of completions of uneven length."""
    samples = []
    for group in range(SEQUENCES // GROUP):
        prompt = tuple(chance.choices(range(1000), k=chance.randint(20, 200)))
        for _ in range(GROUP):
            n = chance.randint(2, LENGTH)
            completion = tuple(chance.choices(range(1000), k=n))
            samples.append(Sample(prompt, completion, 1.0, group, (-1.0,) * n))
    return samples
