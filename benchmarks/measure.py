"""Measure one call: time, phases and memory, in this process or another, and the reason of a failure."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from grpo_fast.policy.host_memory import bytes_in_use
from grpo_fast.policy.out_of_memory import is_out_of_memory

from .problem import Unsupported

SKIPPED, OOM, FAILED = "skipped", "out of memory", "failed"
NO_TIME = "no time left"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints when it starts and stops
_POLL = 0.02  # seconds
T = TypeVar("T")


class Failure(Exception):
    """Raised by `in_a_process`, with the status and the reason."""


def failure_of(error: Exception) -> tuple[str, str]:
    """Return the status (SKIPPED, OOM or FAILED) and a reason that fits in a table."""
    if isinstance(error, Failure):
        return error.args
    if isinstance(error, ImportError):
        return SKIPPED, f"not installed: {error}"
    if isinstance(error, Unsupported):
        return SKIPPED, str(error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return OOM, OOM
    return FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Moment:
    """CUDA event on the current stream. The difference of two is in seconds."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Moment) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


_replayed = [0.0]


def elsewhere() -> float:
    """Return the time of a clock that only `replay` advances."""
    return _replayed[0]


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Pass times of another process to a benchmark that is marked with the timer `elsewhere`."""
    spent = iter(seconds)
    benchmark.pedantic(lambda: _replayed.append(_replayed.pop() + next(spent)), rounds=len(seconds))


class Stopwatch:
    """Wall-clock timer of a call and its phases. Each mark waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._last = device, 0.0
        self._phase: str | None = None
        self._seconds: dict[str | None, float] = {}

    def start(self) -> None:
        self._phase = None
        self._mark()
        self._seconds.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`, without inner phases; also a decorator of functions."""
        self._mark()
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._mark()
            self._phase = outer

    def stop(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the start, and those of each phase."""
        self._mark()
        return sum(self._seconds.values()), {name: of for name, of in self._seconds.items() if name}

    def _mark(self) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._last
        self._last = now


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase; a sample without it counts as zero."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory(device: torch.device) -> None:
    """Free unreachable objects and cached blocks; raise RuntimeError where the device takes no more work."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def in_a_process(
    device: torch.device, call: Callable[..., T], *arguments: Any, seconds: float = math.inf
) -> tuple[T, int]:
    """Call in a new process; return the result, and the peak of the bytes beyond those used before.

    On a GPU the bytes are those of the whole device, polled; on a CPU, those of the process.

    Raises:
        Failure: the call failed, took longer than so many seconds, or its process died.
    """
    on_gpu, deadline = device.type == "cuda", time.monotonic() + seconds
    # A fork cannot use a GPU that its parent has initialized.
    context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    before = highest = bytes_in_use(device)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        answer = pool.submit(_answer, call, arguments)
        while not wait([answer], _POLL).done and time.monotonic() < deadline:
            highest = max(highest, bytes_in_use(device))
        late = not answer.done()
        for process in multiprocessing.active_children():
            process.kill()  # even if a library keeps it from ending
    if late:
        raise Failure(SKIPPED, f"{NO_TIME}: took more than {seconds:g} s")
    try:
        result, grown = answer.result()
    except BrokenProcessPool:
        raise Failure(OOM, f"{OOM}: the process died") from None
    return result, highest - before if on_gpu else grown


def _answer(call: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[T, int]:
    """Return the result, and the bytes by which this process grew. Errors become a picklable Failure."""
    before = bytes_in_use(torch.device("cpu"))
    try:
        return call(*arguments), bytes_in_use(torch.device("cpu")) - before
    except Exception as error:
        raise Failure(*failure_of(error)) from None


def preload(*libraries: str) -> None:
    """Import libraries once for all later processes on a CPU; missing ones are skipped."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "transformers", *libraries])
