"""One call measured: its time and phases, its peak memory, and what it is called when it fails."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

OK, SKIPPED, OOM, FAILED = "ok", "skipped", "oom", "failed"
NOT_INSTALLED, NO_TIME = "not installed", "no time left"
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_RESET_PEAK = "5"  # proc(5), clear_refs: the peak becomes the present size


class Unsupported(Exception):
    """Raised where an implementation cannot do what is asked; the message is the reason shown."""


class TooSlow(Exception):
    """Raised by `at_most` inside what took too long."""


class DeviceLost(RuntimeError):
    """Nothing more can be measured in this process; `culprit` is the implementation that ended it."""

    def __init__(self, culprit: str, reason: str) -> None:
        super().__init__(f"{culprit} broke the device: {reason}")
        self.culprit = culprit


def failure_of(error: Exception) -> tuple[str, str]:
    """Status (SKIPPED, OOM or FAILED) and a reason that fits in a table."""
    if isinstance(error, ImportError):
        return SKIPPED, f"{NOT_INSTALLED}: {error}"
    if isinstance(error, Unsupported | TooSlow):
        return SKIPPED, str(error)
    text = " ".join(str(error).split())
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or any(sign in text for sign in _MEMORY_SIGNS):
        return OOM, ""
    return FAILED, f"{type(error).__name__}: {text[:300]}"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `TooSlow` in the body once the time is over.

    By a signal, so it reaches the main thread on Unix alone, and between two Python instructions: a kernel
    that never ends is not interrupted. Elsewhere the body takes as long as it takes.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: Any) -> None:
        raise TooSlow(f"{NO_TIME}: took more than {seconds:.0f} s")

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, ring)
    earlier, interval = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if earlier:  # somebody else's alarm, such as a test runner's
            left = max(earlier - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements, milliseconds."""

    median: float
    lower: float  # quartiles
    upper: float
    samples: int


def summarise(seconds: Sequence[float]) -> Spread:
    """Median and quartiles of at least one sample."""
    cuts = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()) * 1e3
    lower, median, upper = cuts.tolist()
    return Spread(median, lower, upper, len(seconds))


@dataclass
class _Span:
    name: str
    begin: Any
    end: Any = None
    parent: _Span | None = None


@dataclass
class Stopwatch:
    """Marks phases between events of the stream on CUDA, by the wall clock elsewhere.

    Events don't make the host wait, so that phases cost what they cost without a stopwatch. `wall` is for
    work that other streams or processes do, an inference engine's: the device is waited for at each mark.
    """

    device: torch.device
    wall: bool = False
    _spans: list[_Span] = field(default_factory=list)
    _open: list[_Span] = field(default_factory=list)
    _begin: Any = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for `name`, less what inner phases take."""
        span = _Span(name, self._mark(), parent=self._open[-1] if self._open else None)
        self._spans.append(span)
        self._open.append(span)
        try:
            yield
        finally:
            self._open.remove(span)
            span.end = self._mark()

    def time(self, call: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds of a call, and of the phases marked in it; what lies in no phase is not in the second."""
        self.start()
        call()
        return self.stop()

    def start(self) -> None:
        self._spans.clear()
        self._open.clear()
        synchronize(self.device)
        self._begin = self._mark()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Seconds since the start, and of the phases."""
        end = self._mark()
        synchronize(self.device)
        phases: dict[str, float] = {}
        for span in self._spans:
            seconds = self._elapsed(span.begin, span.end)
            phases[span.name] = phases.get(span.name, 0.0) + seconds
            if span.parent is not None:
                phases[span.parent.name] -= seconds
        return self._elapsed(self._begin, end), phases

    @property
    def _by_events(self) -> bool:
        return self.device.type == "cuda" and not self.wall

    def _mark(self) -> Any:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        synchronize(self.device)
        return time.perf_counter()

    def _elapsed(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._by_events else end - begin


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 1) -> Spread:
    """Of calls one after another."""
    watch = Stopwatch(device)
    return summarise([watch.time(call)[0] for _ in range(repeats)])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Memory:
    """Bytes one call took at its peak beyond its inputs, its results included. None where nobody counts."""

    allocator: int | None  # what torch handed out; None on a CPU
    driver: int | None  # what the process took from the device, or on a CPU from the system

    @property
    def best(self) -> int | None:
        """By torch's count where it counts, else by the driver's or the system's."""
        return self.driver if self.allocator is None else self.allocator


def memory_of(call: Callable[[], object], device: torch.device) -> Memory:
    """One call with an emptied cache. Results of `call` must not outlive it, except in the problem."""
    if device.type != "cuda":
        return Memory(None, peak_growth(call))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    return Memory(peak, max(0, free - torch.cuda.mem_get_info(device)[0]))


def peak_growth(call: Callable[[], object]) -> int | None:
    """Bytes by which the process grew at its largest while `call` ran; None where nobody counts.

    Memory that the C library kept from earlier calls is handed back first, else it would hide what `call`
    takes.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others need none
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        call()
        return None
    held = resident_bytes()
    call()
    peak = resident_bytes(peak=True)
    return None if held is None or peak is None else max(0, peak - held)


def resident_bytes(process: int | str = "self", *, peak: bool = False) -> int | None:
    """Resident now, or at the most since the last reset; None where the system does not say."""
    name = "VmHWM:" if peak else "VmRSS:"
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


def give_back_memory(device: torch.device) -> None:
    """What nobody holds any more; raises RuntimeError where the device takes no more work."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory, or a safe guess."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return 32 << 20
