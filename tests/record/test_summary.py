from __future__ import annotations

import math

import pytest

from grpo_fast.record.summary import before_after, bytes_text, duration_text, mean_interval, score_text


def test_a_proportion_gets_wilsons_interval():
    low, high = mean_interval([1.0] * 81 + [0.0] * 182)

    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert mean_interval([0.0] * 20) == (0.0, pytest.approx(0.1611, abs=1e-4))
    assert mean_interval([1.0] * 20)[1] == 1.0


def test_values_that_are_no_proportion_get_the_normal_interval() -> None:
    half = 1.959964 * math.sqrt((0.0625 + 0.0625) / 3) / 2

    assert mean_interval([0.25, 0.5, 0.75, 0.5]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert mean_interval([0.3]) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="values is empty"):
        mean_interval([])


def test_before_and_after_stand_in_one_line() -> None:
    for nothing in (None, (-math.inf, math.inf), [None, None]):
        assert score_text(0.49, nothing) == "49.0 %"
    before = {"score": 0.217, "interval": (0.174, 0.267), "n": 300}
    after = {"score": 0.49, "interval": (0.434, 0.546), "n": 300}

    text = before_after(before, after)

    assert text == "21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6], +27.3 points (300 questions, 95 % intervals)"
    assert "100 and 300 questions" in before_after(before | {"n": 100}, after)
    close = {"score": 0.25, "interval": (0.204, 0.302), "n": 300}
    assert "+3.3 points, no clear difference (its interval is ±6.8)" in before_after(before, close)


def test_durations_and_bytes_read_naturally() -> None:
    durations = {0.35: "350ms", 12.34: "12.3s", 59.97: "1m00s", 501: "8m21s", 3599.6: "1h00m"}
    durations |= {11100: "3h05m", 187200: "2d04h"}
    assert {seconds: duration_text(seconds) for seconds in durations} == durations
    sizes = {12: "12 B", 2048: "2.0 KiB", 5 << 20: "5.0 MiB", 3 << 29: "1.5 GiB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
