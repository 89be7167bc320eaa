"""Rewards begun while others decode: the same table, the same errors, called as groups complete."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.experience import generate
from grpo_fast.rewards import Reward, RewardError, RewardSet
from grpo_fast.rollout import Completion, Sampling

PROMPTS = [
    Prompt(i, f"question {i}", (1, 2), {"answer": str(i)} | ({"hint": "x"} if i == 3 else {}))
    for i in range(6)
]


def completions(n: int = 3) -> list[list[Completion]]:
    return [
        [Completion((5, 6), (-1.0, -1.0), f"{i} {j}", False) for j in range(n)] for i in range(len(PROMPTS))
    ]


class Engine:
    """Completes its groups in a random order; what happens after each is the test's."""

    def __init__(self, after: Any = lambda index: None) -> None:
        self.after = after
        order = list(range(len(PROMPTS)))
        seed = random.randrange(2**31)
        print(f"seed {seed}")
        random.Random(seed).shuffle(order)
        self.order = order

    def generate(self, prompts: Any, n: int, sampling: Any, *, observer: Any) -> list[list[Completion]]:
        groups = completions(n)
        for done, index in enumerate(self.order, start=1):
            observer.group_done(index, groups[index])
            observer.progress(10 * done, n * done, n * len(groups))
            self.after(index)
        return groups


def product(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(a) + float(text.split()[1]) / 10 for text, a in zip(completions, answer, strict=True)]


def some(completions: Sequence[str], hint: Sequence[str | None]) -> list[float | None]:
    return [None if h is None else float(text[-1]) for text, h in zip(completions, hint, strict=True)]


def rank_in_batch(completions: Sequence[str]) -> list[float]:
    return [sorted(completions).index(text) / len(completions) for text in completions]


async def later(completions: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def score(rewards: RewardSet, engine: Any) -> Any:
    groups, early = generate(engine, PROMPTS, 3, Sampling(4), rewards)
    known = early.values() if early is not None else {}
    return known, rewards.score_completions(PROMPTS, groups, precomputed=known)


def rewards(*functions: Any, per_group: Sequence[str], **options: Any) -> RewardSet:
    return RewardSet(
        [Reward(f.__name__, f, 2.0, per_group=f.__name__ in per_group, **options) for f in functions]
    )


def test_scores_are_those_of_calls_for_the_whole_batch() -> None:
    functions = (product, some, rank_in_batch, later)
    known, found = score(rewards(*functions, per_group=("product", "some", "later")), Engine())
    expected = rewards(*functions, per_group=()).score_completions(PROMPTS, completions())

    assert sorted(known) == ["later", "product", "some"]
    assert torch.equal(found.table.nan_to_num(-7), expected.table.nan_to_num(-7))
    assert torch.equal(found.total.nan_to_num(-7), expected.total.nan_to_num(-7))


def test_a_group_is_scored_before_the_next_one_is_complete() -> None:
    called: dict[str, threading.Event] = {str(i): threading.Event() for i in range(len(PROMPTS))}

    def noticed(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        called[answer[0]].set()
        return [1.0] * len(completions)

    engine = Engine(after=lambda index: called[str(index)].wait(30) or pytest.fail("nobody scored it"))
    known, _ = score(rewards(noticed, per_group=("noticed",)), engine)
    assert known == {"noticed": [1.0] * 18}


def failing(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    if "4" in answer:
        raise KeyError("no such question")
    return [1.0] * len(completions)


def short(completions: Sequence[str]) -> list[float]:
    return [1.0]


def missing_column(completions: Sequence[str], nowhere: Sequence[str]) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [failing, short, missing_column])
def test_an_error_is_the_one_that_a_call_for_the_whole_batch_gives(function: Any) -> None:
    with pytest.raises(RewardError) as late:
        rewards(function, per_group=()).score_completions(PROMPTS, completions())
    with pytest.raises(RewardError) as early:
        score(rewards(product, function, per_group=("product", function.__name__)), Engine())
    assert str(early.value) == str(late.value) and early.value.sample == late.value.sample


def test_a_failing_function_is_skipped_where_that_is_configured_and_the_others_keep_their_values() -> None:
    known, result = score(
        rewards(failing, product, per_group=("failing", "product"), on_error="skip"), Engine()
    )
    assert "failing" not in known and list(result.skipped) == ["failing"]
    assert not result.table[:, 1].isnan().any()


def test_an_interrupted_rollout_waits_for_no_reward() -> None:
    release = threading.Event()

    def slow(completions: Sequence[str]) -> list[float]:
        release.wait(60)
        return [1.0] * len(completions)

    def interrupt(index: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        score(rewards(slow, per_group=("slow",)), Engine(after=interrupt))
    release.set()
    for thread in threading.enumerate():
        if thread.name in ("early rewards", "reward"):
            thread.join(30)
    assert threading.active_count() <= before


def test_an_engine_that_names_no_groups_gets_its_rewards_all_the_same() -> None:
    engine = SimpleNamespace(generate=lambda prompts, n, sampling, observer: completions(n))
    known, found = score(rewards(product, per_group=("product",)), engine)
    assert known == {} and found.table.shape == (18, 1)
