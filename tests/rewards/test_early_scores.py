"""Rewards begun while others decode: the same table, the same errors, called as groups complete."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.loop.collect import generate
from grpo_fast.rewards import Reward, RewardError, RewardSet
from grpo_fast.rollout import Completion, Sampling

PROMPTS = [
    Prompt(i, f"question {i}", (1, 2), {"answer": str(i)} | ({"hint": "x"} if i == 3 else {}))
    for i in range(6)
]
COMPLETIONS = [
    [Completion((5, 6), (-1.0, -1.0), f"{i} {j}", False) for j in range(3)] for i in range(len(PROMPTS))
]


@pytest.fixture
def score(seed: int) -> Callable[..., Any]:
    """(values known early, result) of a rollout whose groups complete in a random order."""

    def score(rewards: RewardSet, after: Callable[[int], object] = lambda index: None) -> Any:
        def run(prompts: Any, n: int, sampling: Any, *, observer: Any) -> list[list[Completion]]:
            for index in random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS)):
                observer.group_done(index, COMPLETIONS[index])
                after(index)
            return COMPLETIONS

        groups, early = generate(SimpleNamespace(generate=run), PROMPTS, 3, Sampling(4), rewards)
        known = early.values()
        return {name: values for name, (values, _) in known.items()}, rewards.score_completions(
            PROMPTS, groups, precomputed=known
        )

    return score


def product(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(a) + float(text.split()[1]) / 10 for text, a in zip(completions, answer, strict=True)]


def some(completions: Sequence[str], hint: Sequence[str | None]) -> list[float | None]:
    return [None if h is None else float(text[-1]) for text, h in zip(completions, hint, strict=True)]


def rank_in_batch(completions: Sequence[str]) -> list[float]:
    return [sorted(completions).index(text) / len(completions) for text in completions]


async def later(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def failing(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    if "4" in answer:
        raise KeyError("no such question")
    return [1.0] * len(completions)


def short(completions: Sequence[str]) -> list[float]:
    return [1.0]


def missing_column(completions: Sequence[str], nowhere: Sequence[str]) -> list[float]:
    return [1.0] * len(completions)


def rewards(*functions: Any, early: Sequence[Any], **options: Any) -> RewardSet:
    return RewardSet([Reward(f.__name__, f, 2.0, per_group=f in early, **options) for f in functions])


def test_scores_are_those_of_calls_for_the_whole_batch(score) -> None:
    functions = (product, some, rank_in_batch, later)
    known, found = score(rewards(*functions, early=(product, some, later)))
    expected = rewards(*functions, early=()).score_completions(PROMPTS, COMPLETIONS)

    assert sorted(known) == ["later", "product", "some"]
    torch.testing.assert_close(found.table, expected.table, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.total, expected.total, rtol=0, atol=0, equal_nan=True)


def test_a_group_is_scored_before_the_next_one_is_complete_and_not_again(score) -> None:
    called: dict[str, threading.Event] = {str(i): threading.Event() for i in range(len(PROMPTS))}
    calls: list[str] = []

    def noticed(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        calls.append(answer[0])
        called[answer[0]].set()
        return [1.0] * len(completions)

    def after(index: int) -> None:
        assert called[str(index)].wait(300), "nobody scored it"

    known, _ = score(rewards(noticed, early=(noticed,)), after)
    assert known == {"noticed": [1.0] * 18} and sorted(calls) == list(called)


@pytest.mark.parametrize("function", [failing, short, missing_column])
def test_an_error_is_the_one_that_a_call_for_the_whole_batch_gives(score, function: Any) -> None:
    with pytest.raises(RewardError) as late:
        rewards(function, early=()).score_completions(PROMPTS, COMPLETIONS)
    with pytest.raises(RewardError) as early:
        score(rewards(product, function, early=(product, function)))
    assert str(early.value) == str(late.value) and early.value.sample == late.value.sample


def test_a_failing_function_is_skipped_where_that_is_configured(score) -> None:
    known, result = score(rewards(failing, product, early=(failing, product), on_error="skip"))
    assert "failing" not in known and list(result.skipped) == ["failing"]
    assert not result.table[:, 1].isnan().any()


def test_an_interrupted_rollout_waits_for_no_reward(score) -> None:
    release, others = threading.Event(), {*threading.enumerate()}

    def slow(completions: Sequence[str]) -> list[float]:
        release.wait(60)
        return [1.0] * len(completions)

    def interrupt(index: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(rewards(slow, early=(slow,)), interrupt)
    left = [thread for thread in {*threading.enumerate()} - others if thread.name == "early rewards"]
    release.set()
    for thread in left:
        assert thread.daemon  # the end of the program waits for it neither
        thread.join(300)
        assert not thread.is_alive()
