from decimal import Decimal

import pytest

from grpo_fast.rewards.builtins.matching import ExactMatch, NumericMatch, number_in

GSM8K = "She sold 48 / 2 = <<48/2=24>>24 clips in May.\nIn all 1,072.\n#### 1,072"


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("4", "4", 1.0), (" 4\n", 4, 1.0), ("4.", "4", 0.0), ("Four", "four", 0.0), ("4", None, None)],
)
def test_exact_match_compares_text_but_for_the_spaces_around(completion, answer, value):
    assert ExactMatch()([completion], answer=[answer]) == [value]


def test_exact_match_may_ignore_case_and_look_at_a_part():
    reward = ExactMatch(ignore_case=True, extract="Answer: (.*)")
    completions = ["Answer: no\nAnswer: Yes", "yes", "Answer: no"]
    assert reward(completions, answer=["yes"] * 3) == [1.0, 0.0, 0.0]


def test_conversations_are_read_like_text():
    assert ExactMatch()([[{"role": "assistant", "content": "4"}]], answer=["4"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = 42.", "42"),
        ("1,234.50 dollars", "1234.50"),
        ("it is -3", "-3"),
        ("it is \N{MINUS SIGN}3", "-3"),
        ("5-3", "3"),
        ("10-20", "20"),
        ("costs $-5", "-5"),
        ("between 1, 2", "2"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1.5e3", "1500"),
        ("2e-2", "0.02"),
        ("3e999999999", "999999999"),
    ],
)
def test_the_last_number_of_a_text_is_read(text, number):
    assert number_in(text) == Decimal(number)


def test_a_text_without_number_has_none():
    assert number_in("no idea") is None


def test_numeric_match_reads_the_answers_of_gsm8k():
    completions = ["So it is 1072.", "1,072.00 clips", "24", "none"]
    assert NumericMatch()(completions, answer=[GSM8K] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_numeric_match_may_demand_a_marker():
    reward = NumericMatch(marker="####")
    completions = ["#### 72 clips in 2 months", "#### 5\n#### 72", "72", "####"]
    assert reward(completions, answer=["72"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_numeric_match_may_tolerate_a_difference():
    assert NumericMatch(tolerance=0.1)(["3.1", "3.2"], answer=[3.0, 3.0]) == [1.0, 0.0]


@pytest.mark.parametrize("answer", [None, "", "no number"])
def test_numeric_match_does_not_apply_where_the_answer_has_no_number(answer):
    assert NumericMatch()(["3"], answer=[answer]) == [None]


def test_a_missing_answer_column_is_named_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"no column 'answer' \(answer_column\): there are anser; did you mean"
    ):
        NumericMatch()(["3"], anser=["3"])
