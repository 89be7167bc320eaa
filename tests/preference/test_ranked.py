"""Ranked groups: what is read and written, what a wrong line is told, and groups of other judgements."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast.preference.ranked import (
    RankedGroup,
    RankedResponse,
    group_from_criteria,
    group_from_rankings,
    group_from_scores,
    groups_from_rollouts,
    pairs_from_group,
    parse_group,
    read_ranked,
    write_ranked,
)

THREE = ("a", "b", "c")
GOOD = {"response": "4", "rank": 1}


def row(*items: Any, **more: object) -> dict:
    return {"prompt": "2 + 2 =", "group": list(items), **more}


def grades(group: RankedGroup) -> list[float]:
    return [response.grade for response in group.responses]


def test_ranks_count_down_scores_count_up_both_keep_ties_and_nulls_are_absent():
    ranks = [{"response": text, "rank": rank} for text, rank in (("4", 1), ("four", 1), ("5", 2))]
    scores = [{"response": "4", "score": 0.9, "rank": None}, {"response": "5", "score": -2, "extra": None}]
    assert grades(parse_group(row(*ranks), "here")) == [-1.0, -1.0, -2.0]
    assert grades(parse_group(row(*scores, weight=None), "here")) == [0.9, -2.0]


def test_groups_survive_writing_and_reading(tmp_path):
    conversation = [{"role": "user", "content": "b?"}]
    groups = [
        RankedGroup("a?", (RankedResponse("x", 1.0, -3.5), RankedResponse("y", 0.0)), "letters", 2.0),
        RankedGroup(conversation, tuple(RankedResponse(str(i), i / 2) for i in range(3))),
    ]
    write_ranked(tmp_path / "groups.jsonl", groups)
    assert read_ranked(tmp_path / "groups.jsonl") == groups
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_ranked(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"group": [GOOD, GOOD]}, "prompt = None"),
        (row(GOOD), "group = "),
        ({"prompt": "p", "group": "4"}, "group = '4'"),
        (row(GOOD, "5"), "group[1] = '5'"),
        (row(GOOD, {"response": "5"}), "group[1] = "),
        (row(GOOD, {"response": "5", "rank": 1, "score": 2}), "both of rank and score"),
        (row(GOOD, {"response": "5", "score": 0.5}), "group mixes rank and score"),
        (row(GOOD, {"response": "5", "rank": "second"}), "group[1].rank = 'second'"),
        (row(GOOD, {"response": "5", "rank": 0}), "group[1].rank = 0"),
        (row(GOOD, {"response": "5", "rank": True}), "group[1].rank = True"),
        (row(GOOD, {"response": " ", "rank": 2}), "group[1].response = ' '"),
        (row(GOOD, {"response": None, "rank": 2}), "group[1].response"),
        (row(GOOD, {"response": "5", "rank": 2, "reward": 1}), "group[1].reward"),
        (row(GOOD, {"response": "5", "rank": 2, "logprob": 0.5}), "group[1].logprob = 0.5"),
        (row(GOOD, {"response": "4", "rank": 2}), "group[0] and group[1] are the same response"),
        (row(GOOD, {"response": "5", "rank": 2}, group_type=3), "group_type = 3"),
        (row(GOOD, {"response": "5", "rank": 2}, weight=-1), "weight = -1"),
        (row(GOOD, {"response": "5", "rank": 2}, weight=math.inf), "weight"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line, named, tmp_path):
    path = tmp_path / "groups.jsonl"
    right = row(GOOD, {"response": "5", "rank": 2})
    path.write_text("".join(json.dumps(record) + "\n" for record in (right, line)))
    with pytest.raises(ValueError) as error:
        read_ranked(path)
    assert "line 2: " in str(error.value) and named in str(error.value)


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
    def group(rewards: list[float], *completions: tuple[str, tuple[float, ...]]) -> Any:
        drawn = [SimpleNamespace(text=text, logprobs=logprobs) for text, logprobs in completions]
        prompt = SimpleNamespace(prompt="p")
        return SimpleNamespace(prompt=prompt, completions=drawn, rewards=torch.tensor(rewards))

    x, y = ("x", (-1.0, -2.0)), ("y", (-0.5,))
    made = groups_from_rollouts(
        [group([1.0, 0.0, 1.0], x, y, ("x", (-3.0,))), group([1.0, 1.0], x, y), group([1.0, math.nan], x, y)]
    )
    assert made == [RankedGroup("p", (RankedResponse("x", 1.0, -3.0), RankedResponse("y", 0.0, -0.5)))]


def test_a_group_gives_its_extreme_pair_or_every_pair_of_different_grade():
    group = group_from_scores("p", THREE, [1.0, 2.0, 1.0])
    every = [(pair["chosen"], pair["rejected"]) for pair in pairs_from_group(group, every=True)]
    assert pairs_from_group(group) == [{"prompt": "p", "chosen": "b", "rejected": "c"}]
    assert every == [("b", "a"), ("b", "c")]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: group_from_scores("p", ["a"], [1.0]), "1 responses"),
        (lambda: group_from_scores("p", THREE, [1.0]), "scores has 1 values for 3"),
        (lambda: group_from_scores("p", THREE, [1.0] * 3, tie_width=-1), "tie_width = -1"),
        (lambda: group_from_rankings("p", THREE, []), "rankings"),
        (lambda: group_from_rankings("p", THREE, [[1, 2]]), r"rankings\[0\] has 2 values"),
        (lambda: group_from_criteria("p", THREE, {}), "criteria"),
        (lambda: group_from_criteria("p", THREE, {"x": [1, 2, 3]}, {"y": 1}), "weights"),
        (lambda: group_from_criteria("p", THREE, {"x": [1, 2, 3]}, {"x": 0}), "weights"),
    ],
)
def test_judgements_that_do_not_fit_the_responses_are_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
