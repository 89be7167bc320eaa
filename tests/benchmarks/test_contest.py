"""Turns and failures of a contest, with entrants made of nothing; phases, memory and processes."""

from __future__ import annotations

import os
import signal
import time
import weakref

import pytest
import torch

from benchmarks import measure
from benchmarks.contest import FEWEST, Entrant, Prepared, measure_in_turns
from benchmarks.measure import (
    FAILED,
    OK,
    OOM,
    Failure,
    Stopwatch,
    failure_of,
    in_a_process,
    preload,
)
from benchmarks.record import Measurement

CPU = torch.device("cpu")


def entrant(name: str, calls: list[str], **options: object) -> Entrant:
    return Entrant(name, lambda: Prepared(lambda _: calls.append(name), **options))


def outcome(*entrants: Entrant, seconds: float = 60.0) -> dict[str, Measurement]:
    cells = measure_in_turns({}, entrants, CPU, time.monotonic() + seconds, FEWEST)
    return {found.implementation: found for found in cells}


def test_entrants_take_turns_after_a_warm_up_and_a_run_for_memory():
    calls: list[str] = []

    def fail(_: object) -> None:
        assert calls.count("a") < 3, "boom"

    bad = Entrant("bad", lambda: Prepared(fail, close=lambda: calls.append("closed")))
    found = outcome(entrant("a", calls, metrics={"loss": 2.0}), bad, entrant("b", calls))

    assert calls == ["a", "a", "b", "b", "a", "closed", "b"] + ["a", "b"] * (FEWEST - 1)
    assert [len(one.seconds) for one in found.values()] == [FEWEST, 0, FEWEST]
    assert (found["a"].status, found["a"].metrics) == (OK, {"loss": 2.0})
    assert found["bad"].status == FAILED and found["bad"].reason.startswith("AssertionError: boom")


@pytest.mark.parametrize("in_closure", [True, False])
def test_what_ran_out_of_memory_is_given_back_before_the_next_one_runs(in_closure):
    held: list[weakref.ref] = []

    def buffer() -> torch.Tensor:
        found = torch.empty(1000)
        held.append(weakref.ref(found))
        return found

    def greedy() -> Prepared:
        kept = buffer() if in_closure else None

        def run(_: object) -> None:
            taken = kept if in_closure else buffer()
            raise torch.OutOfMemoryError(f"on top of {taken.nbytes}")

        return Prepared(run)

    def check() -> Prepared:
        assert [reference() for reference in held] == [None]
        return Prepared(lambda _: None)

    found = outcome(Entrant("greedy", greedy), Entrant("next", check))

    assert [one.status for one in found.values()] == [OOM, OK]


def test_phases_add_up_without_inner_ones(monkeypatch):
    clock = iter([0.0, 1, 2, 12, 14, 20, 23, 123])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)

    def call() -> None:
        with watch.phase("head"), watch.phase("forward"):
            pass
        watch.phase("head")(lambda: None)()

    assert watch.time(call) == (123, {"head": 1 + 2 + 3, "forward": 10})


def test_a_call_has_a_process_of_its_own_and_its_failure_is_reported():
    preload("benchmarks.step")  # all processes of the session are forked from one that has imported it
    noise, grown = in_a_process(CPU, os.urandom, 1 << 26)

    assert len(noise) == 1 << 26 and 0 < grown < 1 << 30
    assert in_a_process(CPU, os.getpid)[0] != os.getpid()
    for call, given, failure in (
        (int, "x", (FAILED, "ValueError: invalid literal for int() with base 10: 'x'")),
        (signal.raise_signal, signal.SIGKILL, (OOM, "the process died")),
    ):
        with pytest.raises(Failure) as raised:
            in_a_process(CPU, call, given)
        assert failure_of(raised.value) == failure
    with pytest.raises(Failure, match=r"took more than 0\.5 s"):
        in_a_process(CPU, time.sleep, 600, seconds=0.5)
