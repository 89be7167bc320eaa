"""Ranking measures against brute force and values worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.preference.comparison import Comparison, comparison_table
from grpo_fast.preference.evaluation import (
    RankingEvaluation,
    kendall_tau_b,
    pairwise_accuracy,
    position_accuracy,
    top1_accuracy,
)


def test_kendalls_tau_b_is_its_definition_for_random_sequences_with_ties(seed):
    draw = random.Random(seed)
    for _ in range(100):
        n = draw.randrange(2, 9)
        a, b = ([draw.randrange(4) for _ in range(n)] for _ in range(2))
        pairs = [(i, j) for i in range(n) for j in range(i)]
        products = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
        ties_a, ties_b = (sum(x[i] == x[j] for i, j in pairs) for x in (a, b))
        denominator = math.sqrt((len(pairs) - ties_a) * (len(pairs) - ties_b))
        concordance = sum(p > 0 for p in products) - sum(p < 0 for p in products)
        expected = concordance / denominator if denominator else 0.0
        assert kendall_tau_b(a, b) == pytest.approx(expected)
    # The example of scipy.stats.kendalltau's documentation.
    assert kendall_tau_b([12, 2, 1, 12, 2], [1, 4, 7, 1, 0]) == pytest.approx(-0.47140452079103173)


def test_accuracies_leave_tied_grades_out_and_halve_tied_scores():
    assert pairwise_accuracy([2, 1, 1], [0.5, 0.1, 0.9]) == 0.5
    assert pairwise_accuracy([2, 1], [0.3, 0.3]) == 0.5
    # The order 3 1 2 has the first of three positions right; tied, each of two is in both places half.
    assert position_accuracy([3, 2, 1], [0.9, 0.1, 0.3]) == pytest.approx(1 / 3)
    assert position_accuracy([3, 2, 1], [0.9, 0.3, 0.3]) == pytest.approx(2 / 3)
    assert position_accuracy([2, 1, 1], [0.9, 0.1, 0.3]) == 1.0
    assert top1_accuracy([2, 2, 1], [0.1, 0.9, 0.3]) == 1.0
    assert top1_accuracy([2, 1, 1], [0.9, 0.9, 0.3]) == 0.5


def test_an_evaluation_reports_both_scores_and_consistency_by_type():
    lengths, logprobs = ((12, 2), (2, 2)), torch.tensor([-6.0, -3.0, -1.0, -3.0])
    table = comparison_table(
        Comparison(Prompt(0, "p", (1,), {}), ((7,) * a, (7,) * b), (1.0, 0.0), group_type="sums")
        for a, b in lengths
    )
    summed, averaged = (RankingEvaluation(table, logprobs, averaged) for averaged in (False, True))
    assert (summed.score, averaged.score, summed.n) == (0.5, 1.0, 2)
    assert summed.interval[0] < 0.5 < summed.interval[1]
    of_both = {
        "ranking/sum/kendall_tau": 0.0, "ranking/mean/kendall_tau": 1.0,
        "ranking/sum/top1_accuracy": 0.5, "ranking/mean/top1_accuracy": 1.0,
        "ranking/sum/pairwise_accuracy": 0.5, "ranking/mean/pairwise_accuracy": 1.0,
        "ranking/sum/position_accuracy": 0.5, "ranking/mean/position_accuracy": 1.0,
    }  # fmt: skip
    by_type = {f"ranking/{name}_accuracy/sums": 0.5 for name in ("pairwise", "position")}
    by_type["ranking/consistency/sums"] = 0.5
    assert summed.metrics == of_both | by_type
    assert averaged.metrics == of_both | dict.fromkeys(by_type, 1.0)
    kinds = ("sums", "sums", "words", "words")  # of one group each: none has a consistency of its own
    apart = RankingEvaluation(replace(table, objects={"group_type": kinds}), logprobs, averaged=False)
    assert {name: value for name, value in apart.metrics.items() if "consistency" in name} == {
        "ranking/consistency": 0.5
    }
    three = comparison_table(
        Comparison(Prompt(0, "p", (1,), {}), ((7,),) * 3, (3.0, 2.0, 1.0), group_type="sums")
        for _ in range(2)
    )
    half_right = RankingEvaluation(three, torch.tensor([-1.0, -3, -2, -1, -2, -3]), averaged=False)
    assert half_right.metrics["ranking/consistency/sums"] == pytest.approx(5 / 6)  # of 2 / 3 and 1
    undecided = RankingEvaluation(table[:2], torch.tensor([-2.0, -2.0]), averaged=False)
    assert undecided.metrics["ranking/sum/kendall_tau"] == 0.0
