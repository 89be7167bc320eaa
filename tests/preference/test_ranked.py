"""Ranked groups: what is read, and what a wrong line is told."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from grpo_fast.preference.ranked import RankedGroup, RankedResponse, parse_group, read_ranked

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


def test_a_file_gives_its_groups_in_order_with_types_weights_and_log_probabilities(tmp_path):
    items = [{"response": "4", "score": 0.25, "logprob": -1.5}, {"response": "5", "score": 0.25}]
    (tmp_path / "groups.jsonl").write_text(
        json.dumps(row(*items, group_type="sum", weight=2)) + "\n" + json.dumps(row(*items)) + "\n"
    )
    responses = (RankedResponse("4", 0.25, -1.5), RankedResponse("5", 0.25))
    assert read_ranked(tmp_path / "groups.jsonl") == [
        RankedGroup("2 + 2 =", responses, "sum", 2.0), RankedGroup("2 + 2 =", responses)
    ]  # fmt: skip


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
