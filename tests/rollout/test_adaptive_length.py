from __future__ import annotations

import json

import pytest

from grpo_fast.rollout import Completion
from grpo_fast.rollout.adaptive_length import CompletionLength
from grpo_fast.rollout.config import AdaptiveLengthConfig, RolloutConfig

CONFIG = AdaptiveLengthConfig(min=16, max=200, window=3)


def after(length: CompletionLength, *steps: tuple[list[int], float]) -> int:
    """The limit after steps with completions of these lengths, of which this share was cut off."""
    for lengths, truncated in steps:
        cut = round(truncated * len(lengths))
        length.observe(
            [Completion((7,) * n, (-1.0,) * n, "", truncated=i < cut) for i, n in enumerate(lengths)]
        )
    return length.limit


def test_the_limit_grows_while_many_are_cut_off_and_stops_at_its_maximum() -> None:
    length = CompletionLength(100, CONFIG)
    cut = ([100] * 10, 0.2)

    assert after(length, cut, cut) == 100  # the window is not full
    assert after(length, cut) == 150
    assert after(length, cut, cut) == 150  # a new window
    assert after(length, cut) == 200
    assert after(length, *[cut] * 6) == 200


def test_the_limit_shrinks_to_what_the_longest_step_needs_and_not_below_its_minimum() -> None:
    length = CompletionLength(100, CONFIG)
    assert after(length, ([10] * 10, 0.0), ([32] * 10, 0.0), ([10] * 10, 0.0)) == 40
    assert after(length, *[([2] * 10, 0.0)] * 3) == 16


def test_a_limit_that_has_moved_does_not_move_back_for_the_same_completions() -> None:
    length = CompletionLength(100, CONFIG)
    step = ([32] * 10, 0.0)
    assert after(length, *[step] * 3) == 40
    assert after(length, *[step] * 9) == 40


@pytest.mark.parametrize(
    "steps",
    [
        [([90] * 100, 0.09)] * 9,  # not above the threshold
        [([10] * 100, 0.01)] * 9,  # short, but some are cut off
        [([10] * 10, 0.0), ([60] * 10, 0.0), ([10] * 10, 0.0)],  # one step needs it
        [([10] * 90 + [60] * 10, 0.0)] * 9,  # more than 1 % need it
    ],
)
def test_in_between_it_stays(steps: list[tuple[list[int], float]]) -> None:
    assert after(CompletionLength(100, CONFIG), *steps) == 100


def test_without_a_configuration_it_never_moves() -> None:
    length = CompletionLength.of(RolloutConfig(max_completion_length=64))
    assert after(length, *[([64] * 4, 1.0)] * 20) == 64


def test_a_resumed_run_decides_as_one_that_went_on() -> None:
    steps = [([100] * 10, 0.2), ([80] * 9 + [100], 0.1), ([100] * 10, 0.3), ([30] * 10, 0.0)]
    steps += [([20] * 10, 0.0)] * 4
    whole, resumed = CompletionLength(100, CONFIG), CompletionLength(100, CONFIG)
    for step in steps:
        before = json.loads(json.dumps(resumed.state_dict()))
        resumed = CompletionLength(100, CONFIG)
        resumed.load_state_dict(before)
        assert after(resumed, step) == after(whole, step)


def test_a_start_outside_the_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="max_completion_length = 256"):
        RolloutConfig(max_completion_length=256, adaptive_length={"max": 128})
