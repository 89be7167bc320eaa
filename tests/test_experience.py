"""A rollout and what it earned: completions observed, scored, compared with those of their prompt."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.experience import RolloutWatch, compare, describe, generate, score
from grpo_fast.groups import group_advantages
from grpo_fast.groups.advantages import decoupled_advantages
from grpo_fast.groups.config import AdvantageConfig
from grpo_fast.rewards import Reward, RewardSet
from grpo_fast.rollout import Completion, Sampling


@pytest.fixture
def scored(rng):
    """Four prompts with three completions each, and two rewards read off a table."""
    table = torch.randn(4, 3, 2, generator=rng)
    prompts = [Prompt(i, f"question {i}", (1, 2), {}) for i in range(4)]
    completions = [
        tuple(Completion((5,) * (1 + i + j), (-1.0,) * (1 + i + j), f"{i} {j}", False) for j in range(3))
        for i in range(4)
    ]

    def column(index: int):
        return lambda completions: [table[int(c[0]), int(c[2]), index].item() for c in completions]

    rewards = RewardSet([Reward("first", column(0), 2.0), Reward("second", column(1), -0.5)])

    def scored(config: AdvantageConfig, weights=None, baseline_groups=None):
        groups = score(prompts, completions, rewards, weights=weights)
        return compare(groups, config, weights or rewards.weights, baseline_groups)

    return table, scored


def advantages(groups) -> torch.Tensor:
    return torch.tensor([group.advantages for group in groups])


def test_rewards_are_weighted_and_compared_within_each_prompt(scored):
    table, score = scored
    groups = score(AdvantageConfig())
    totals = 2.0 * table[..., 0] - 0.5 * table[..., 1]
    torch.testing.assert_close(torch.stack([group.rewards for group in groups]), totals)
    torch.testing.assert_close(advantages(groups), group_advantages(totals).advantages)


def test_other_weights_and_shared_baselines_take_their_place(scored):
    table, score = scored
    config = AdvantageConfig(baseline="leave_one_out", scale_rewards="none")
    groups = score(config, weights=(1.0, 3.0), baseline_groups=[0, 1, 0, 2])
    totals = table[..., 0] + 3.0 * table[..., 1]
    expected = group_advantages(
        totals, baseline="leave_one_out", scale_rewards="none", baseline_groups=[0, 1, 0, 2]
    ).advantages
    torch.testing.assert_close(advantages(groups), expected)
    torch.testing.assert_close(torch.stack([group.rewards for group in groups]), totals)


def test_each_reward_is_scaled_by_itself_on_request(scored):
    table, score = scored
    config = AdvantageConfig(multi_objective_aggregation="normalize_then_sum", scale_rewards="batch")
    groups = score(config, baseline_groups=[0, 0, 1, 1])
    expected = decoupled_advantages(table, (2.0, -0.5), scale_rewards="batch", baseline_groups=[0, 0, 1, 1])
    torch.testing.assert_close(advantages(groups), expected.advantages)


def test_metrics_tell_how_length_and_reward_go_together(scored):
    _, score = scored
    groups = score(AdvantageConfig())
    metrics = describe(groups, ("first", "second"))
    ranks = torch.tensor([-1.0, 0.0, 1.0]).repeat(
        4
    )  # each completion is one token longer than the one before
    rewards = torch.cat([group.rewards - group.rewards.mean() for group in groups])
    expected = torch.corrcoef(torch.stack([ranks, rewards]))[0, 1].item()
    assert metrics["completion/length_reward_correlation"] == pytest.approx(expected, abs=1e-4)


def test_the_trainer_is_called_back_once_when_few_completions_are_left() -> None:
    calls: list[int] = []
    finished = 0
    watch = RolloutWatch(prefetch=lambda: calls.append(finished))
    for finished in range(21):
        watch.progress(finished, finished, 20)
    assert calls == [18]


def test_a_watch_without_anyone_to_tell_keeps_quiet() -> None:
    watch = RolloutWatch()
    watch.group_done(0, [])
    watch.progress(1, 1, 1)


def test_the_prefill_counts_as_generation() -> None:
    seen: list[tuple[int, int, int]] = []

    class Engine:
        def generate(self, prompts, n, sampling, *, observer):
            assert seen == [(0, 0, 6)]
            return [[] for _ in prompts]

    rewards = RewardSet([Reward("one", lambda completions: [1.0] * len(completions))])
    prompts = [Prompt(i, "?", (1,), {}) for i in range(2)]
    groups, early = generate(
        Engine(), prompts, 3, Sampling(4), rewards, progress=lambda *numbers: seen.append(numbers)
    )
    assert groups == [[], []] and early is None


def test_an_engine_that_fails_is_heard() -> None:
    class Engine:
        def generate(self, prompts, n, sampling, *, observer):
            raise RuntimeError("the engine sleeps")

    rewards = RewardSet([Reward("one", lambda completions: [1.0] * len(completions), per_group=True)])
    with pytest.raises(RuntimeError, match="sleeps"):
        generate(Engine(), [Prompt(0, "?", (1,), {})], 2, Sampling(4), rewards)
