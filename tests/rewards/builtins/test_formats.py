import pytest

from grpo_fast.rewards.builtins.formats import RegexFormat, TagFormat, TagFormatIncremental

RIGHT = "<think>a\nb</think>\n<answer>c</answer>"


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (RIGHT, 1.0),
        (f"  {RIGHT}\n", 1.0),
        (f"Well, {RIGHT}", 0.0),
        (f"{RIGHT} there", 0.0),
        ("<think>a</think> so <answer>c</answer>", 0.0),
        ("<answer>c</answer><think>a</think>", 0.0),
        ("<think>a<answer>c</answer></think>", 0.0),
        ("<think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c", 0.0),
        ("<think>a</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>c</answer><answer>d</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_the_strict_format_is_every_tag_once_in_order_and_nothing_else(completion, value):
    assert TagFormat()([completion]) == [value]


def test_a_tag_that_the_prompt_opens_counts():
    assert TagFormat(tags=["think"], prefix="<think>")(["a</think>", "<think>a</think>"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "value"),
    [(RIGHT, 1.0), ("<think>a</think>", 0.5), ("<think>", 0.25), ("<think><think>", 0.0), ("", 0.0)],
)
def test_the_incremental_format_is_the_share_of_tags(completion, value):
    assert TagFormatIncremental()([completion]) == [value]


def test_a_pattern_must_match_the_whole_completion():
    reward = RegexFormat(pattern=r"Answer: -?\d+\s*")
    assert reward(["Answer: 12\n", "Answer: x", "So Answer: 12", "Answer: 12 yes"]) == [1.0, 0.0, 0.0, 0.0]
