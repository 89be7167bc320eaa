"""One call measured: its time and phases, its peak memory, and the name of its failure."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch

from grpo_fast.policy.host_memory import bytes_in_use
from grpo_fast.policy.out_of_memory import is_out_of_memory

OK, SKIPPED, OOM, FAILED = "ok", "skipped", "oom", "failed"
NOT_INSTALLED, NO_TIME = "not installed", "no time left"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler says when it starts and stops
_LOOK_EVERY, _TO_END = 0.02, 10.0  # seconds
T = TypeVar("T")


class Unsupported(Exception):
    """Raised where an implementation cannot do what is asked; the message is the reason shown."""


class TooSlow(Exception):
    """Raised by `at_most` inside what took too long."""


class Failure(Exception):
    """Raised by `in_a_process`: status and reason of what ended the call there."""


class DeviceLost(RuntimeError):
    """Nothing more can be measured in this process; `culprit` is the implementation that ended it."""

    def __init__(self, culprit: str, reason: str) -> None:
        super().__init__(f"{culprit} broke the device: {reason}")
        self.culprit = culprit


def failure_of(error: Exception) -> tuple[str, str]:
    """Status (SKIPPED, OOM or FAILED) and a reason that fits in a table."""
    if isinstance(error, Failure):
        return error.args
    if isinstance(error, ImportError):
        return SKIPPED, f"{NOT_INSTALLED}: {error}"
    if isinstance(error, Unsupported | TooSlow):
        return SKIPPED, str(error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return OOM, ""
    return FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `TooSlow` in the body once the time is over.

    By the process' alarm, so in the main thread alone, and between two Python instructions: a kernel that
    never ends is not interrupted.
    """

    def ring(*_: Any) -> None:
        raise TooSlow(f"{NO_TIME}: took more than {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, ring)
    earlier, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        # An alarm that was set before, such as a test runner's, starts its wait again.
        signal.setitimer(signal.ITIMER_REAL, earlier, interval)
        signal.signal(signal.SIGALRM, handler)


# Time -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements, milliseconds."""

    median: float
    lower: float  # quartiles
    upper: float
    samples: int


def summarise(seconds: Sequence[float]) -> Spread:
    """Median and quartiles of at least one sample."""
    lower, median, upper = (1e3 * np.quantile(seconds, (0.25, 0.5, 0.75))).tolist()
    return Spread(median, lower, upper, len(seconds))


class Stopwatch:
    """Times a call and the phases marked in it, by events of the stream on CUDA, the wall clock elsewhere.

    Events don't make the host wait, so that phases cost what they cost without a stopwatch. `wall` is for
    work that other streams or processes do, an inference engine's: the device is waited for at each mark.
    """

    def __init__(self, device: torch.device, wall: bool = False) -> None:
        self.device = device
        self._events = device.type == "cuda" and not wall
        self._open: list[str] = []  # phases, the innermost last
        self._marks: list[tuple[Any, str | None]] = []  # a moment, and the innermost phase from then on

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for `name`, less what inner phases take."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            del self._open[-1:]
            self._mark()

    def time(self, call: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds of a call, and of the phases marked in it; what lies in no phase is not in the second."""
        self.start()
        call()
        return self.stop()

    def start(self) -> None:
        self._open.clear()
        self._marks.clear()
        synchronize(self.device)
        self._mark()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Seconds since the start, and of the phases."""
        self._mark()
        synchronize(self.device)
        phases: dict[str, float] = {}
        for (begin, name), (end, _) in pairwise(self._marks):
            if name is not None:
                phases[name] = phases.get(name, 0.0) + self._elapsed(begin, end)
        return self._elapsed(self._marks[0][0], self._marks[-1][0]), phases

    def _mark(self) -> None:
        if self._events:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            synchronize(self.device)
            now = time.perf_counter()
        self._marks.append((now, self._open[-1] if self._open else None))

    def _elapsed(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._events else end - begin


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> Spread:
    """Of calls one after another."""
    watch = Stopwatch(device)
    return summarise([watch.time(call)[0] for _ in range(repeats)])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes one call took at its peak beyond its inputs, its results included. None where nobody counts."""

    allocator: int | None  # what torch handed out
    driver: int | None  # what the process took from the device, or a process of its own from the system

    @property
    def best(self) -> int | None:
        """By torch's count where it counts, else by the driver's or the system's."""
        return self.driver if self.allocator is None else self.allocator


def memory_of(call: Callable[[], object], device: torch.device) -> Memory:
    """One call with an emptied cache. Results of `call` must not outlive it, except in the problem."""
    give_back_memory(device)
    if device.type != "cuda":
        from grpo_fast.plan.measure import peak_bytes

        return Memory(peak_bytes(lambda: None, lambda _: call(), device), None)
    torch.cuda.reset_peak_memory_stats(device)
    held, before = torch.cuda.memory_allocated(device), bytes_in_use(device)
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    return Memory(peak, max(0, bytes_in_use(device) - before))


def preload(*libraries: str) -> None:
    """What processes of their own on a CPU find imported; what is missing is passed over."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "transformers", *libraries])


def in_a_process(
    device: torch.device, call: Callable[..., T], *arguments: Any, seconds: float = math.inf
) -> tuple[T, int]:
    """What a call returns in a process of its own, and how many bytes more than before are in use meanwhile.

    The bytes are of the whole GPU, read many times a second, the process' own context included; on a CPU, of
    the process at its largest. Where libraries keep it from ending when it has answered, it is killed.
    transformers is quiet there.

    Raises:
        Failure: the call failed, took longer than so many seconds, or the process ended without an answer;
            killed or aborted, for its memory.
    """
    on_gpu = device.type == "cuda"
    # A fork starts at once, and cannot use a GPU that an import of its parent's has looked for.
    context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    receiver, sender = context.Pipe(duplex=False)
    before = highest = bytes_in_use(device)
    process = context.Process(target=_answer, args=(sender, call, arguments))
    process.start()
    sender.close()
    deadline = time.monotonic() + seconds
    try:
        while not receiver.poll(_LOOK_EVERY):
            if time.monotonic() > deadline:
                raise Failure(SKIPPED, f"{NO_TIME}: took more than {seconds:g} s")
            highest = max(highest, bytes_in_use(device))
        failure, result, grown = receiver.recv()
        process.join(_TO_END)
    except EOFError:
        process.join()
        code = process.exitcode
        status = OOM if code in (-signal.SIGKILL, -signal.SIGABRT) else FAILED
        raise Failure(status, f"the process ended without an answer, exit code {code}") from None
    finally:
        process.kill()
        process.join()
    if failure is not None:
        raise Failure(*failure)
    return result, highest - before if on_gpu else grown


def _answer(sender: Connection, call: Callable[..., Any], arguments: Sequence[Any]) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cpu = torch.device("cpu")
    failure, result, held = None, None, bytes_in_use(cpu)
    try:
        result = call(*arguments)
    except Exception as error:
        failure = failure_of(error)
    sender.send((failure, result, bytes_in_use(cpu) - held))


def give_back_memory(device: torch.device) -> None:
    """Frees unreachable objects and cached blocks; RuntimeError where the device takes no more work."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
