"""Phases of a call, memory that is given back, and processes."""

from __future__ import annotations

import os
import signal
import time
import weakref

import pytest
import torch

from benchmarks import measure, test_head
from benchmarks.measure import Failure, Stopwatch, in_a_process, preload
from benchmarks.peers import Peer
from benchmarks.problem import Problem, Run

CPU = torch.device("cpu")


@pytest.mark.parametrize("in_closure", [True, False])
def test_what_ran_out_of_memory_is_given_back_before_the_next_one_runs(in_closure, run, monkeypatch, capsys):
    held: list[weakref.ref] = []

    def buffer() -> torch.Tensor:
        found = torch.empty(1000)
        held.append(weakref.ref(found))
        return found

    def greedy(problem: Problem) -> Run:
        kept = buffer() if in_closure else None

        def run() -> None:
            taken = kept if in_closure else buffer()
            raise torch.OutOfMemoryError(f"on top of {taken.nbytes}")

        return run

    def check(problem: Problem) -> Run:
        assert held and not any(reference() is not None for reference in held)
        raise ImportError("checked")

    peers = [Peer("greedy", greedy), Peer("next", check)]
    monkeypatch.setitem(test_head.AXES, "peer", ["greedy", "next"])
    monkeypatch.setattr("benchmarks.peers.all_peers", lambda: peers)
    run("head", "--shape=16x8x50", "--rows=flat")

    printed = capsys.readouterr().out
    assert "| out of memory" in printed and "| not installed: checked" in printed


def test_phases_add_up_without_inner_ones(monkeypatch):
    clock = iter([0.0, 1, 2, 12, 14, 20, 23, 123])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(CPU)

    watch.start()
    with watch.phase("head"), watch.phase("forward"):
        pass
    watch.phase("head")(lambda: None)()

    assert watch.stop() == (123, {"head": 1 + 2 + 3, "forward": 10})


def test_a_call_has_a_process_of_its_own_and_its_failure_is_reported():
    preload("benchmarks.updates")  # all processes of the session are forked from one that has imported it
    noise, grown = in_a_process(CPU, os.urandom, 1 << 26)

    assert len(noise) == 1 << 26 and 0 < grown < 1 << 30
    for call, given, seconds, failure in (
        (int, "x", 60, "ValueError: invalid literal for int"),
        (signal.raise_signal, signal.SIGKILL, 60, "out of memory: the process died"),
        (time.sleep, 600, 0.5, r"took more than 0\.5 s"),
    ):
        with pytest.raises(Failure, match=failure):
            in_a_process(CPU, call, given, seconds=seconds)
