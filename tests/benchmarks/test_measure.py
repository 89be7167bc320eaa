"""The time of a call and its phases, its memory, how long it may take, and what its failure is called."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from benchmarks import measure
from benchmarks.machine import _command
from benchmarks.measure import (
    FAILED,
    OOM,
    SKIPPED,
    Failure,
    Stopwatch,
    TooSlow,
    Unsupported,
    at_most,
    failure_of,
    in_a_process,
    memory_of,
    preload,
)


def test_phases_add_up_without_inner_ones_and_a_call_that_raised_leaves_nothing_behind(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    watch = Stopwatch(torch.device("cpu"))

    def call() -> None:
        with watch.phase("head"):
            clock[0] += 1
            with watch.phase("forward"):
                clock[0] += 10
            clock[0] += 2
        with watch.phase("head"):
            clock[0] += 3
        clock[0] += 100

    def fail() -> None:
        with watch.phase("a"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        watch.time(fail)
    assert watch.time(call) == (116, {"head": 6, "forward": 10})
    assert watch.time(lambda: None) == (0, {})


def test_the_peak_of_a_call_is_seen_although_it_is_given_back():
    memory = memory_of(lambda: [torch.empty(1 << 20).neg() for _ in range(4)].clear(), torch.device("cpu"))

    assert memory.best == memory.allocator == 5 << 22  # four of 4 MiB, and what the last was made of


def test_a_call_has_a_process_of_its_own_and_its_failure_and_its_end_are_told():
    preload(measure.__name__)
    cpu = torch.device("cpu")
    noise, grown = in_a_process(cpu, os.urandom, 1 << 26)

    assert len(noise) == 1 << 26 and 1 << 26 <= grown < 1 << 28
    assert in_a_process(cpu, os.getpid)[0] != os.getpid()
    silent = "the process ended without an answer, exit code"
    for call, given, failure in (
        (int, "x", (FAILED, "ValueError: invalid literal for int() with base 10: 'x'")),
        (signal.raise_signal, signal.SIGKILL, (OOM, f"{silent} -9")),
        (signal.raise_signal, signal.SIGSEGV, (FAILED, f"{silent} -11")),
    ):
        with pytest.raises(Failure) as raised:
            in_a_process(cpu, call, given)
        assert failure_of(raised.value) == failure


def test_the_memory_of_a_gpu_is_looked_at_while_the_process_works(monkeypatch):
    used, kinds, context_of = iter([100, 110, 170, *[120] * 10_000]), [], multiprocessing.get_context
    monkeypatch.setattr(measure, "bytes_in_use", lambda _: next(used))
    fast = context_of("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: kinds.append(kind) or fast)

    assert in_a_process(torch.device("cuda"), time.sleep, 0.3) == (None, 70)
    assert kinds == ["spawn"]


def test_what_takes_too_long_is_interrupted_and_an_alarm_set_before_still_rings():
    rung = []
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()

        with pytest.raises(TooSlow), at_most(0.1):
            time.sleep(30)
        with at_most(60):
            pass
        while not rung and time.monotonic() < start + 20:
            time.sleep(0.01)

        assert rung and time.monotonic() < start + 20
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


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


def test_the_command_is_what_one_would_type_without_paths_and_where_the_results_went():
    typed = ["-m", "benchmarks", "head", "--json", "/some/out.json", "--minutes", "2"]

    assert _command(typed) == ["python", "-m", "benchmarks", "head", "--minutes", "2"]
    assert _command(["/some/where/bin/grpo-fast", "bench"]) == ["grpo-fast", "bench"]
