"""The time of a call and its phases, its memory, how long it may take, and what its failure is called."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from benchmarks import measure
from benchmarks.measure import FAILED, OOM, SKIPPED, Stopwatch, TooSlow, Unsupported, at_most, failure_of

alarmed = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no alarm")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the wall shows; a test moves it."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
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

    assert watch.time(call) == (113, {"head": 3, "forward": 10})


def test_a_call_that_raised_leaves_nothing_behind(clock):
    watch = Stopwatch(torch.device("cpu"))

    def fail() -> None:
        with watch.phase("a"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        watch.time(fail)

    assert watch.time(lambda: None) == (0, {})


def test_the_peak_of_a_call_is_seen_although_it_is_given_back():
    peak = measure.peak_growth(lambda: [os.urandom(1 << 20) for _ in range(128)].clear())
    if peak is None:
        pytest.skip("this system does not reset a process' peak")

    assert peak > 100 << 20  # of 128 MiB: pages that were resident before may be used again


def test_a_process_that_is_not_there_has_no_memory():
    assert measure.resident_bytes(2**22 + 1) is None  # beyond any process id of Linux


@alarmed
def test_what_takes_too_long_is_interrupted():
    start = time.monotonic()

    with pytest.raises(TooSlow), at_most(0.1):
        time.sleep(30)

    assert time.monotonic() - start < 20


@alarmed
def test_what_is_quick_is_left_alone_and_an_alarm_set_before_still_rings():
    rung = []
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
        signal.setitimer(signal.ITIMER_REAL, 0.3)

        with at_most(60):
            pass
        deadline = time.monotonic() + 20
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)

        assert rung
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_in_another_thread_nothing_is_interrupted():
    done = []

    def work() -> None:
        with at_most(0.01):
            time.sleep(0.1)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert done


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("tried to allocate a vocabulary"), OOM, ""),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OOM, ""),
        (MemoryError(), OOM, ""),
        (ImportError("no such library"), SKIPPED, "not installed: no such library"),
        (Unsupported("needs a CUDA device"), SKIPPED, "needs a CUDA device"),
        (RuntimeError("kernel\nexploded"), FAILED, "RuntimeError: kernel exploded"),
    ],
)
def test_a_failure_has_a_status_and_a_reason_in_one_line(error, status, reason):
    assert failure_of(error) == (status, reason)
