"""Ranked groups in files: what is read, what is written, and what a wrong line is told."""

from __future__ import annotations

import json

import pytest

from grpo_fast.preference.ranked import RankedGroup, RankedResponse, parse_group, read_ranked, write_ranked


def row(*items: dict, **more: object) -> dict:
    return {"prompt": "2 + 2 =", "group": list(items), **more}


def test_ranks_count_down_and_scores_count_up_and_both_keep_ties():
    ranks = [{"response": text, "rank": rank} for text, rank in (("4", 1), ("four", 1), ("5", 2))]
    scores = [{"response": text, "score": score} for text, score in (("4", 0.9), ("5", -2))]
    assert [r.grade for r in parse_group(row(*ranks), "here").responses] == [-1.0, -1.0, -2.0]
    assert [r.grade for r in parse_group(row(*scores), "here").responses] == [0.9, -2.0]


def test_groups_survive_writing_and_reading(tmp_path):
    groups = [
        RankedGroup("a?", (RankedResponse("x", 1.0, -3.5), RankedResponse("y", 0.0)), "letters", 2.0),
        RankedGroup(
            [{"role": "user", "content": "b?"}], tuple(RankedResponse(str(i), i / 2) for i in range(3))
        ),
    ]
    write_ranked(tmp_path / "groups.jsonl", groups)
    assert read_ranked(tmp_path / "groups.jsonl") == groups


GOOD = {"response": "4", "rank": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"group": [GOOD, GOOD]}, "line 2: prompt = None must be text"),
        (row(GOOD), "line 2: group = .* must be a list of at least two responses"),
        ({"prompt": "p", "group": "4"}, "line 2: group = '4' must be a list"),
        (row(GOOD, "5"), r"line 2: group\[1\] = '5' must be an object"),
        (row(GOOD, {"response": "5"}), r"line 2: group\[1\] has neither rank nor score"),
        (row(GOOD, {"response": "5", "rank": 1, "score": 2}), r"line 2: group\[1\] has both rank and score"),
        (row(GOOD, {"response": "5", "score": 0.5}), "line 2: group mixes rank and score"),
        (
            row(GOOD, {"response": "5", "rank": "second"}),
            r"line 2: group\[1\].rank = 'second' must be a finite number",
        ),
        (row(GOOD, {"response": "5", "rank": 0}), r"line 2: group\[1\].rank = 0 must be 1 or more"),
        (
            row(GOOD, {"response": "5", "rank": True}),
            r"line 2: group\[1\].rank = True must be a finite number",
        ),
        (
            row(GOOD, {"response": " ", "rank": 2}),
            r"line 2: group\[1\].response = ' ' must be text that is not empty",
        ),
        (row(GOOD, {"response": "5", "rank": 2, "reward": 1}), r"line 2: group\[1\].reward is no field"),
        (
            row(GOOD, {"response": "5", "rank": 2, "logprob": 0.5}),
            r"line 2: group\[1\].logprob = 0.5 must not be above",
        ),
        (row(GOOD, {"response": "4", "rank": 2}), r"line 2: group\[0\] and group\[1\] are the same response"),
        (row(GOOD, {"response": "5", "rank": 2}, group_type=3), "line 2: group_type = 3 must be text"),
        (row(GOOD, {"response": "5", "rank": 2}, weight=-1), "line 2: weight = -1.0 must not be negative"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line, said, tmp_path):
    path = tmp_path / "groups.jsonl"
    right = row(GOOD, {"response": "5", "rank": 2})
    path.write_text("".join(json.dumps(record) + "\n" for record in (right, line)))
    with pytest.raises(ValueError, match=said):
        read_ranked(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_ranked(tmp_path / "none.jsonl")
