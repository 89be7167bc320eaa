import re
from decimal import Decimal

import numpy as np
import pandas
import pytest

from grpo_fast.config.lookup import load_callable
from grpo_fast.config.patterns import Pattern
from grpo_fast.config.rewards import BUILTINS, RewardConfig
from grpo_fast.data import Prompt
from grpo_fast.rewards import RewardError, load_rewards
from grpo_fast.rewards.builtins.text import number_in
from grpo_fast.rollout import Completion

GSM8K = "She sold 48 / 2 = <<48/2=24>>24 clips in May.\nIn all 1,072.\n#### 1,072"
TAGS = "<think>a\nb</think>\n<answer>c</answer>"


def score(name, completions, options=None, **columns):
    return load_callable(BUILTINS[name], "reward")(**options or {})(completions=completions, **columns)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("4", "4", 1.0), (" 4\n", 4, 1.0), ("4.", "4", 0.0), ("Four", "four", 0.0), ("4", None, None)],
)
def test_exact_match_compares_text_but_for_the_spaces_around(completion, answer, value):
    assert score("exact_match", [completion], answer=[answer]) == [value]


def test_exact_match_may_ignore_case_and_look_at_a_part():
    options = {"ignore_case": True, "extract": "Answer: (.*)"}
    completions = ["Answer: no\nAnswer: Yes", "yes", "Answer: no"]
    assert score("exact_match", completions, options, answer=["yes"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            ("x = 42.", "42"),
            ("it is -3", "-3"),
            ("it is \N{MINUS SIGN}3", "-3"),
            ("5-3", "3"),
            (".5", "0.5"),
        ),
        *(("1,234.50 dollars", "1234.50"), ("1,2", "2"), ("12,3456", "3456"), ("-.5", "-0.5")),
        *(("1.5e3", "1500"), ("3e999999999", "999999999"), ("no idea", None)),
    ],
)
def test_the_last_number_of_a_text_is_read(text, number):
    assert number_in(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("options", "completions", "answer", "values"),
    [
        ({}, ["So it is 1072.", "1,072.00 clips", "24", "none"], GSM8K, [1.0, 1.0, 0.0, 0.0]),
        (
            {"marker": "####"},
            ["#### 72 in 2 months", "#### 5\n#### 72", "72", "####"],
            "72",
            [1.0, 1.0, 0.0, 0.0],
        ),
        ({"tolerance": 0.1}, ["3.1", "3.2"], 3.0, [1.0, 0.0]),
        ({}, ["3"], None, [None]),
        ({}, ["3"], "", [None]),
        ({}, ["3"], "no number", [None]),
    ],
    ids=["gsm8k", "marker", "tolerance", "no answer", "empty answer", "answer without number"],
)
def test_numeric_match_compares_numbers(options, completions, answer, values):
    assert score("numeric_match", completions, options, answer=[answer] * len(completions)) == values


def test_a_missing_answer_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'answer' \(answer_column\).*anser"):
        score("numeric_match", ["3"], anser=["3"])


@pytest.mark.parametrize(
    ("completion", "strict", "share"),
    [
        *((TAGS, 1.0, 1.0), (f"  {TAGS}\n", 1.0, 1.0), (f"Well, {TAGS}", 0.0, 1.0), ("", 0.0, 0.0)),
        ("<think>a</think> so <answer>c</answer>", 0.0, 1.0),
        ("<answer>c</answer><think>a</think>", 0.0, 1.0),
        ("<think>a<answer>c</answer></think>", 0.0, 1.0),
        ("<think></think><answer>c</answer>", 0.0, 1.0),
        ("<think>a</think><answer>c", 0.0, 0.75),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0.0, 0.5),
        ("<think><think>", 0.0, 0.0),
    ],
)
def test_strict_tags_come_once_in_order_and_incremental_ones_give_a_share(completion, strict, share):
    assert score("tag_format", [completion]) == [strict]
    assert score("tag_format_incremental", [completion]) == [share]


def test_a_tag_that_the_prompt_opens_counts():
    options = {"tags": ["think"], "prefix": "<think>"}
    assert score("tag_format", ["a</think>", "<think>a</think>"], options) == [1.0, 0.0]
    rewards = load_rewards([RewardConfig(reward=name) for name in ("tag_format", "tag_format_incremental")])
    rest, text = (Completion((1,), None, t, False) for t in (TAGS.removeprefix("<think>"), TAGS))
    prompts = [Prompt(index, "q", (1,), {}, begun=begun) for index, begun in enumerate(("<think>", "<a>"))]
    table = rewards.score_completions(prompts, [[rest, text], [rest, text]]).table
    assert table.tolist() == [[1.0, 1.0], [0.0, 0.75], [0.0, 0.75], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["exact_match", "numeric_match", "math_verify"])
@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        (["4", "5"], "5", 1.0),
        (("4", None), "4", 1.0),
        (np.array([4.0, 5.0]), "4", 1.0),
        ([4, 5], "6", 0.0),
        (4.0, "4", 1.0),
        (Decimal("4.50"), "4.5", 1.0),
        (np.float32(0.5), "0.5", 1.0),
        (float("nan"), "nan", None),
        (pandas.NA, "4", None),
        ([], "4", None),
        *((answer, "4", "give text, a number, or a list") for answer in ({"a": "4"}, b"4", [["4"]], [{}])),
    ],
    ids=str,
)
def test_answers_may_be_numbers_and_lists_of_which_any_is_right(name, answer, completion, value):
    rewards = load_rewards([RewardConfig(reward=name), RewardConfig(reward="length", options={"target": 1})])
    prompts = [Prompt(0, "q", (1,), {"answer": answer})]
    if isinstance(value, str):
        with pytest.raises(RewardError, match=f"'answer' .answer_column., row 0: .*{value}"):
            rewards.check_columns(["answer"], prompts)
        return
    rewards.check_columns(["answer"], prompts)
    found = rewards.score_completions(prompts, [[Completion((1,), None, completion, False)]]).table[0, 0]
    assert found == value if value is not None else found.isnan()


def test_a_pattern_must_match_the_whole_completion():
    completions = ["Answer: 12\n", "Answer: x", "So Answer: 12", "Answer: 12 yes"]
    assert score("regex_format", completions, {"pattern": r"Answer: -?\d+\s*"}) == [1.0, 0.0, 0.0, 0.0]


def test_a_pattern_is_matched_once_for_all_answers(monkeypatch):
    matched, last = [], Pattern.last
    monkeypatch.setattr(Pattern, "last", lambda self, text: matched.append(text) or last(self, text))
    assert score("exact_match", ["a 4", "b 5"], {"extract": r"(\d)"}, answer=[["3", "4"], []]) == [1.0, None]
    assert matched == ["a 4"]


BACKTRACKS = "(?:a|a)*c|d"  # doubles its work with each `a`


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("regex_format", {"pattern": BACKTRACKS}),
        ("exact_match", {"extract": f"({BACKTRACKS})"}),
        ("reasoning_gym", {"extract": f"({BACKTRACKS})"}),
    ],
)
def test_a_pattern_that_backtracks_scores_0_and_is_counted(name, options, caplog):
    found = {}
    entry = {"metadata": {"source_dataset": "chain_sum"}, "answer": "d"}
    columns = {"answer": ["d", "d"], "entry": [entry, entry]}
    assert score(name, ["a" * 60, "d"], options, **columns, log_metric=found.__setitem__) == [0.0, 1.0]
    assert found == {"regex/timeouts": 0.5}
    assert "took longer than 1 s on 1 of 2 completions, which score 0" in caplog.text


@pytest.mark.parametrize(
    "pattern",
    [r"a{e}", r"\{e<=1}", r"[{s}]x", r"a{2}b{,3}c{1,}", r"\N{EN DASH}{i}", re.compile("A.b", re.I | re.S)],
)
def test_a_pattern_means_what_it_means_to_re(pattern):
    texts = [
        "a{e}",
        "ab",
        "{e<=1}",
        "{x",
        "sx",
        "aabbc",
        "aac",
        "ac",
        "\N{EN DASH}{i}",
        "\N{EN DASH}",
        "a\nB",
    ]
    expected = [float(re.fullmatch(pattern, text) is not None) for text in texts]
    assert score("regex_format", texts, {"pattern": pattern}) == expected and any(expected)


@pytest.mark.parametrize(
    ("name", "options", "lengths", "values"),
    [
        ("length", {"target": 10, "penalty": 2.0}, [10, 5, 20], [0.0, -1.0, -2.0]),
        ("soft_overlong", {"max_length": 10, "cache": 4}, [0, 6, 8, 10, 20], [0.0, 0.0, -0.5, -1.0, -1.0]),
    ],
)
def test_lengths_are_scored_in_tokens(name, options, lengths, values):
    ids = [[0] * length for length in lengths]
    assert score(name, [""] * len(ids), options, completion_ids=ids) == values
