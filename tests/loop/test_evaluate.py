"""pass@k, mean@k and their intervals, against enumeration and simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from grpo_fast.config.evaluation import EvaluationConfig
from grpo_fast.data.types import Prompt
from grpo_fast.distributed.world import SINGLE_PROCESS
from grpo_fast.loop.evaluate import Evaluation, evaluate, pass_at_k
from grpo_fast.rewards.reward_set import Reward, RewardSet
from grpo_fast.rollout.types import Completion, Sampling


@pytest.mark.parametrize("total", [1, 2, 5, 7])
def test_pass_at_k_equals_the_share_of_all_subsets_that_hold_a_right_answer(total):
    for right in range(total + 1):
        answers = [i < right for i in range(total)]
        for k in range(1, total + 1):
            subsets = [any(subset) for subset in combinations(answers, k)]
            assert pass_at_k(total, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)
    for k in (0, total + 1):
        with pytest.raises(ValueError, match="answers to a question"):
            pass_at_k(total, 1, k)


class Script:
    """An engine that answers from a script; what is written in capitals was cut off."""

    name = "script"

    def __init__(self, answers: Sequence[Sequence[str]]) -> None:
        self.answers = answers
        self.asked: tuple[list[tuple[int, ...]], int, Sampling] | None = None

    def generate(self, prompts, n, sampling, *, observer=None):
        self.asked = ([tuple(prompt) for prompt in prompts], n, sampling)
        return [[Completion((1,), (0.0,), text, text.isupper()) for text in group] for group in self.answers]


def exact(completions, answer, **_):
    return [float(text == right) if right else None for text, right in zip(completions, answer, strict=True)]


def length(completions, **_):
    return [len(text) / 10 for text in completions]


NAN = math.nan
SAMPLING = Sampling(max_completion_length=4)


def result_of(answers: Sequence[str], engine: Script, sampling: Sampling = SAMPLING, **config) -> Evaluation:
    questions = [Prompt(i, f"question {i}", (10 + i,), {"answer": a}) for i, a in enumerate(answers)]
    rewards = RewardSet([Reward("exact", exact), Reward("length", length, written="rewards.py:length")])
    return evaluate(engine, questions, rewards, EvaluationConfig(**config), sampling, world=SINGLE_PROCESS)


def test_scores_come_in_the_order_of_questions_and_answers():
    engine = Script([["a", "B"], ["x", "x"]])

    result = result_of(["a", "b"], engine, num_samples=2)

    assert engine.asked == ([(10,), (11,)], 2, SAMPLING)
    assert result.scores == ((1.0, 0.0), (0.0, 0.0))
    assert result.completions[0][1].text == "B"
    assert (result.n, result.num_samples, result.skipped) == (2, 2, 0)
    assert (result.score, result.pass_at(2)) == (0.25, 0.5)
    assert result.criterion == "exact>=1"
    means = {"reward": 0.35, "reward/exact/mean": 0.25, "reward/length/mean": 0.1}
    assert result.metrics == pytest.approx(means | {"truncated": 0.25})


@pytest.mark.parametrize("named", ["length", "rewards.py:length"])
def test_the_named_reward_decides_and_a_threshold_beyond_fp32_is_met(named):
    result = result_of(["a", "b"], Script([["123456789"], ["12"]]), threshold=0.9, reward=named)

    assert result.reward_name == "length"
    assert result.score == 0.5


def test_a_question_without_a_score_is_left_out_and_counted():
    result = result_of(["a", "", "x"], Script([["a"], ["b"], ["c"]]))

    assert (result.n, result.skipped, result.score) == (2, 1, 0.5)
    assert math.isnan(result.scores[1][0])
    assert result.rewards == {"exact": 0.5, "length": pytest.approx(0.1)}


def test_pass_at_k_is_of_questions_with_k_scores():
    result = of_scores([[1.0, NAN, NAN], [0.0, 1.0, NAN], [0.0, 0.0, 1.0], [NAN, NAN, NAN]])
    assert [result.counted_at(k) for k in (1, 2, 3)] == [3, 2, 1]
    assert [result.pass_at(k) for k in (1, 2, 3)] == pytest.approx(
        [(1 + 1 / 2 + 1 / 3) / 3, (1 + 2 / 3) / 2, 1]
    )
    with pytest.raises(ValueError, match="k = 4 needs at least as many answers"):
        result.pass_at(4)


@pytest.mark.parametrize(
    ("answers", "config", "temperature", "message"),
    [
        ([], {}, 1.0, "empty"),
        (
            ["a"],
            {"reward": "exakt"},
            1.0,
            "not among the rewards: there are exact, length; did you mean 'exact'",
        ),
        (["a"], {"num_samples": 2}, 0.0, "temperature 0"),
        ([""], {}, 1.0, "applies to no answer"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_the_remedy(answers, config, temperature, message):
    with pytest.raises(ValueError, match=message):
        result_of(answers, Script([["a"]]), Sampling(4, temperature=temperature), **config)


def of_scores(scores: Sequence[Sequence[float]]) -> Evaluation:
    return Evaluation(tuple(map(tuple, scores)), "exact", 1.0, (), ())


def test_the_interval_covers_the_truth_about_as_often_as_it_says(seed):
    rng = random.Random(seed)
    covered = 0
    for _ in range(400):
        chances = [rng.random() for _ in range(60)]
        result = of_scores([[float(rng.random() < c) for _ in range(4)] for c in chances])
        low, high = result.interval
        covered += low <= 0.5 <= high
    assert 0.88 <= covered / 400 <= 0.995
    low, high = of_scores([[1.0, 1.0], [1.0, 0.0]]).interval
    assert 0 <= low < high <= 1
