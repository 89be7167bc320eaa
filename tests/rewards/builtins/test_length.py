import pytest

from grpo_fast.rewards.builtins.length import Length, SoftOverlong


def ids(*lengths):
    return [[0] * length for length in lengths]


def test_length_falls_on_both_sides_of_the_target():
    reward = Length(target=10, penalty=2.0)
    assert reward(["", "", ""], completion_ids=ids(10, 5, 20)) == [0.0, -1.0, -2.0]


def test_soft_overlong_falls_over_the_cache_and_no_further():
    reward = SoftOverlong(max_length=10, cache=4)
    assert reward([""] * 5, completion_ids=ids(0, 6, 8, 10, 20)) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_lengths_need_the_tokens():
    with pytest.raises(ValueError, match="completion_ids is missing: lengths are counted in tokens"):
        Length(target=3)(["a"])
