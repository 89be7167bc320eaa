"""Tools that make ranked groups."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.preference.group_tools import (
    group_from_criteria,
    group_from_rankings,
    group_from_scores,
    groups_from_rollouts,
    pairs_from_group,
)
from grpo_fast.preference.ranked import RankedGroup, RankedResponse

THREE = ("a", "b", "c")


def grades(group: RankedGroup) -> list[float]:
    return [response.grade for response in group.responses]


def test_scores_within_the_tie_width_become_ties():
    assert grades(group_from_scores("p", THREE, [0.51, 0.49, 0.1])) == [0.51, 0.49, 0.1]
    first, second, third = grades(group_from_scores("p", THREE, [0.51, 0.49, 0.1], tie_width=0.25))
    assert first == second > third


def test_several_peoples_rankings_become_mean_places_with_shared_ties():
    # Places: 1, 2, 3 and 1.5, 1.5, 3.
    assert grades(group_from_rankings("p", THREE, [[1, 2, 3], [1, 1, 2]])) == [-1.25, -1.75, -3.0]


def test_criteria_are_standardised_before_they_are_weighted():
    criteria = {"clarity": [1.0, 2.0, 3.0], "length": [3000.0, 2000.0, 1000.0], "style": [5.0, 5.0, 5.0]}
    even = group_from_criteria("p", THREE, criteria)
    leaning = group_from_criteria("p", THREE, criteria, {"clarity": 3, "length": 1, "style": 0})
    assert grades(even) == [0.0, 0.0, 0.0]
    spread = math.sqrt(1.5)
    assert grades(leaning) == pytest.approx([-spread / 2, 0.0, spread / 2])


def test_rollouts_become_groups_with_rewards_and_log_probabilities():
    def completion(text: str, *logprobs: float) -> SimpleNamespace:
        return SimpleNamespace(text=text, logprobs=logprobs)

    def group(*completions: SimpleNamespace, rewards: list[float]) -> SimpleNamespace:
        return SimpleNamespace(
            prompt=SimpleNamespace(prompt="p"), completions=completions, rewards=torch.tensor(rewards)
        )

    made = groups_from_rollouts(
        [
            group(
                completion("x", -1.0, -2.0),
                completion("y", -0.5),
                completion("x", -3.0),
                rewards=[1.0, 0.0, 1.0],
            ),
            group(completion("x", -1.0), completion("y", -1.0), rewards=[1.0, 1.0]),
            group(completion("x", -1.0), completion("y", -1.0), rewards=[1.0, math.nan]),
        ]
    )
    assert made == [RankedGroup("p", (RankedResponse("x", 1.0, -3.0), RankedResponse("y", 0.0, -0.5)))]


def test_a_group_gives_its_extreme_pair_or_every_pair_of_different_grade():
    group = group_from_scores("p", THREE, [1.0, 2.0, 1.0])
    assert pairs_from_group(group) == [{"prompt": "p", "chosen": "b", "rejected": "c"}]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs_from_group(group, every=True)] == [
        ("b", "a"),
        ("b", "c"),
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: group_from_scores("p", ["a"], [1.0]), "1 responses have no order"),
        (lambda: group_from_scores("p", THREE, [1.0]), "scores has 1 values for 3 responses"),
        (
            lambda: group_from_scores("p", THREE, [1.0] * 3, tie_width=-1),
            "tie_width = -1 must not be negative",
        ),
        (lambda: group_from_rankings("p", THREE, []), "rankings is empty"),
        (lambda: group_from_rankings("p", THREE, [[1, 2]]), r"rankings\[0\] has 2 values"),
        (lambda: group_from_criteria("p", THREE, {}), "criteria is empty"),
        (lambda: group_from_criteria("p", THREE, {"x": [1, 2, 3]}, {"y": 1}), "give the same names"),
        (lambda: group_from_criteria("p", THREE, {"x": [1, 2, 3]}, {"x": 0}), "one must be above zero"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(call, said):
    with pytest.raises(ValueError, match=said):
        call()
