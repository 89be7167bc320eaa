from __future__ import annotations

import math
from dataclasses import replace

import pytest

from grpo_fast.run_record.summary import (
    Score,
    before_after,
    bytes_text,
    duration_text,
    mean_interval,
    score_text,
)


def test_a_proportion_gets_wilsons_interval() -> None:
    # 81 of 263: Newcombe (1998, Statistics in Medicine 17, p. 857), table I, method 3.
    low, high = mean_interval([1.0] * 81 + [0.0] * 182)

    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_an_interval_of_nothing_right_still_has_a_width() -> None:
    low, high = mean_interval([0.0] * 20)

    assert low == 0.0
    assert round(high, 4) == 0.1611


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_an_interval_covers_the_true_share_about_as_often_as_it_says(share: float, dice) -> None:
    covered = 0

    for _ in range(1000):
        low, high = mean_interval([float(dice.random() < share) for _ in range(100)], confidence=0.9)
        covered += low <= share <= high

    assert 830 <= covered <= 970  # 900 expected, give or take what a hundred questions allow


def test_values_that_are_no_proportion_get_the_normal_interval() -> None:
    low, high = mean_interval([0.25, 0.5, 0.75, 0.5])

    half = 1.959964 * math.sqrt((0.0625 + 0.0625) / 3) / 2
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)


def test_a_single_value_that_is_no_proportion_tells_nothing() -> None:
    assert mean_interval([0.3]) == (-math.inf, math.inf)


def test_an_interval_needs_values_and_a_confidence_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        mean_interval([])
    with pytest.raises(ValueError, match="confidence = 95"):
        mean_interval([0.0, 1.0], confidence=95)


def test_a_score_is_shown_in_per_cent_with_its_interval_where_it_has_one() -> None:
    assert score_text(0.49, (0.434, 0.546)) == "49.0 % [43.4, 54.6]"
    for nothing in (None, (-math.inf, math.inf), [None, None]):
        assert score_text(0.49, nothing) == "49.0 %"


def test_before_and_after_stand_in_one_line() -> None:
    before = Score(0.217, (0.174, 0.267), 300)
    after = Score(0.49, (0.434, 0.546), 300)

    text = before_after(before, after)

    assert text == "21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6], +27.3 points (300 questions, 95 % intervals)"
    assert "100 and 300 questions" in before_after(replace(before, n=100), after)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.35, "350ms"), (12.34, "12.3s"), (59.97, "1m00s"), (501, "8m21s"), (3599.6, "1h00m")),
        *((11100, "3h05m"), (187200, "2d04h")),
    ],
)
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12B"), (2048, "2KiB"), (5 << 20, "5MiB"), (1.25 * 2**30, "1.2GiB"), (2**41, "2048.0GiB")],
)
def test_bytes_read_naturally(count: float, text: str) -> None:
    assert bytes_text(count) == text
