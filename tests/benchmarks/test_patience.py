"""A limit on how long one may keep the others waiting."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from benchmarks.patience import OutOfPatience, at_most

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no alarm")


def test_what_takes_too_long_is_interrupted():
    start = time.monotonic()

    with pytest.raises(OutOfPatience, match="took more than 0 s"), at_most(0.1):
        time.sleep(30)

    assert time.monotonic() - start < 20


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
