from __future__ import annotations

import pytest

from grpo_fast.data import Prompt
from grpo_fast.experience import RolloutWatch, generate
from grpo_fast.rewards import Reward, RewardSet
from grpo_fast.rollout import Sampling


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
