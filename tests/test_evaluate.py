"""pass@k, mean@k and their intervals, against enumeration and simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from grpo_fast.data.types import Prompt
from grpo_fast.evaluate import Evaluation, evaluate, pass_at_k
from grpo_fast.rewards.reward_set import Reward, RewardSet
from grpo_fast.rollout.types import Completion, Sampling


@pytest.mark.parametrize("total", [1, 2, 5, 7])
def test_pass_at_k_equals_the_share_of_all_subsets_that_hold_a_right_answer(total):
    for right in range(total + 1):
        answers = [i < right for i in range(total)]
        for k in range(1, total + 1):
            subsets = [any(subset) for subset in combinations(answers, k)]
            assert pass_at_k(total, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    chance, total, k, draws = 0.3, 6, 3, 20_000

    estimates = [pass_at_k(total, sum(rng.random() < chance for _ in range(total)), k) for _ in range(draws)]

    mean = sum(estimates) / draws
    spread = math.sqrt(sum((e - mean) ** 2 for e in estimates) / draws**2)
    assert abs(mean - (1 - (1 - chance) ** k)) < 6 * spread


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_answers(k):
    with pytest.raises(ValueError, match="answers to a question"):
        pass_at_k(3, 1, k)


class Script:
    """An engine that answers from a script, and notes what it was asked."""

    name = "script"

    def __init__(self, answers: Sequence[Sequence[str]], truncated: frozenset[str] = frozenset()) -> None:
        self.answers = answers
        self.truncated = truncated
        self.asked: tuple[list[tuple[int, ...]], int, Sampling] | None = None

    def generate(self, prompts, n, sampling, *, observer=None):
        self.asked = ([tuple(prompt) for prompt in prompts], n, sampling)
        return [
            [Completion((1,), (0.0,), text, text in self.truncated) for text in group]
            for group in self.answers
        ]


def questions(*answers: str) -> list[Prompt]:
    return [Prompt(i, f"question {i}", (10 + i,), {"answer": answer}) for i, answer in enumerate(answers)]


def exact(completions, answer, **_):
    return [float(text == right) if right else None for text, right in zip(completions, answer, strict=True)]


def length(completions, **_):
    return [len(text) / 10 for text in completions]


REWARDS = RewardSet([Reward("exact", exact), Reward("length", length)])
SAMPLING = Sampling(max_completion_length=4)


def test_scores_come_in_the_order_of_questions_and_answers():
    engine = Script([["a", "b"], ["x", "x"]])

    result = evaluate(engine, questions("a", "b"), REWARDS, sampling=SAMPLING, num_samples=2)

    assert engine.asked == ([(10,), (11,)], 2, SAMPLING)
    assert result.scores == ((1.0, 0.0), (0.0, 0.0))
    assert result.completions[0][1].text == "b"
    assert (result.n, result.num_samples, result.skipped) == (2, 2, 0)
    assert result.score == 0.25
    assert result.pass_at(2) == 0.5


def test_the_named_reward_decides_and_a_threshold_beyond_fp32_is_met():
    engine = Script([["123456789"], ["12"]])

    result = evaluate(
        engine, questions("a", "b"), REWARDS, sampling=SAMPLING, threshold=0.9, reward_name="length"
    )

    assert result.reward_name == "length"
    assert result.score == 0.5
    assert result.mean_reward == pytest.approx(0.55)


def test_a_question_without_a_score_is_left_out_and_counted():
    engine = Script([["a"], ["b"], ["c"]])

    result = evaluate(engine, questions("a", "", "x"), REWARDS, sampling=SAMPLING)

    assert (result.n, result.skipped, result.score) == (2, 1, 0.5)
    assert math.isnan(result.scores[1][0])


def test_truncated_answers_are_counted():
    result = evaluate(
        Script([["a"], ["b"]], truncated=frozenset("b")), questions("a", "b"), REWARDS, sampling=SAMPLING
    )
    assert result.truncated == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": []}, "empty"),
        ({"reward_name": "exakt"}, "not among the rewards: exact, length"),
        ({"num_samples": 2, "sampling": Sampling(4, temperature=0)}, "temperature 0"),
        ({"dataset": questions("")}, "applies to no answer"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_the_remedy(change, message):
    arguments = {"dataset": questions("a"), "sampling": SAMPLING, **change}
    with pytest.raises(ValueError, match=message):
        evaluate(Script([["a"] * arguments.get("num_samples", 1)]), rewards=REWARDS, **arguments)


def of_scores(scores: Sequence[Sequence[float]]) -> Evaluation:
    rows = tuple(tuple(row) for row in scores)
    return Evaluation(rows, "exact", 1.0, (), ())


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    covered = 0
    for _ in range(400):
        chances = [rng.random() for _ in range(60)]
        result = of_scores([[float(rng.random() < c) for _ in range(4)] for c in chances])
        low, high = result.interval
        covered += low <= 0.5 <= high
    assert 0.88 <= covered / 400 <= 0.995


def test_the_interval_stays_inside_zero_and_one():
    low, high = of_scores([[1.0, 1.0], [1.0, 0.0]]).interval
    assert low >= 0
    assert high <= 1
