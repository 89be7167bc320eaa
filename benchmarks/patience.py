"""How long one implementation may keep the others waiting."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FIRST_CALLS = 120.0
"""Seconds for imports, compilation, autotuning and the first calls of an implementation."""
GRACE = 15.0
"""Seconds beyond a run's deadline to end what has begun."""


class OutOfPatience(Exception):
    """Raised inside what took too long."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `OutOfPatience` in the body once the time is over.

    By a signal, so it reaches the main thread on Unix alone, and between two Python instructions: a kernel
    that never ends is not interrupted. Elsewhere the body takes as long as it takes.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: Any) -> None:
        raise OutOfPatience(f"took more than {seconds:.0f} s")

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    others, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others:  # somebody else's alarm, such as a test runner's
            left = max(others - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
