from __future__ import annotations

import pytest
import torch

from benchmarks import stopwatch
from benchmarks.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the wall shows; a test moves it."""
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    return now


def test_an_inner_phase_does_not_count_for_the_outer_one_and_repeated_phases_add_up(clock):
    watch = Stopwatch(torch.device("cpu"))

    def call() -> None:
        with watch.phase("head"):
            clock[0] += 1
            with watch.phase("forward"):
                clock[0] += 10
        with watch.phase("head"):
            clock[0] += 2
        clock[0] += 100

    seconds, phases = watch.time(call)

    assert seconds == 113
    assert phases == {"head": 3, "forward": 10}


def test_a_call_that_raised_leaves_nothing_behind(clock):
    watch = Stopwatch(torch.device("cpu"))

    def fail() -> None:
        with watch.phase("a"):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        watch.time(fail)

    assert watch.time(lambda: None) == (0, {})
