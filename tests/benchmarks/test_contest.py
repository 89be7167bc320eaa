"""Turns, ceilings and failures of a contest, with entrants made of nothing."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress

import pytest
import torch

from benchmarks import contest as contest_module
from benchmarks.contest import FEWEST, Contest, Entrant, Prepared
from benchmarks.measure import FAILED, NO_TIME, OK, OOM, SKIPPED, DeviceLost
from benchmarks.record import Measurement

CPU = torch.device("cpu")


def entrant(name: str, calls: list[str], **options: object) -> Entrant:
    return Entrant(name, lambda: Prepared(lambda _: calls.append(name), **options))


def failing(name: str, error: BaseException, calls_before: int = 0, **options: object) -> Entrant:
    left = [calls_before]

    def run(_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return Entrant(name, lambda: Prepared(run, **options))


def outcome(*entrants: Entrant, seconds: float = 60.0, **options: object) -> dict[str, Measurement]:
    contest = Contest({}, entrants, CPU, memory=False, **options)
    with suppress(KeyboardInterrupt):
        contest.measure(time.monotonic() + seconds, FEWEST)
    return {found.implementation: found for found in contest.results()}


def test_entrants_take_turns_and_the_warm_up_does_not_count():
    calls: list[str] = []

    found = outcome(entrant("a", calls), entrant("b", calls))

    assert calls == ["a", "b"] + ["a", "b"] * FEWEST
    assert len(found["a"].seconds) == found["a"].time.samples == FEWEST


def test_who_times_itself_gives_several_samples_a_turn_until_they_are_enough():
    turns: list[int] = []

    def turn(_: object) -> list[tuple[float, dict[str, float]]]:
        turns.append(len(turns))
        return [(0.25, {"a": 0.2}), (0.75, {"a": 0.6, "b": 0.1})]

    found = outcome(Entrant("it", lambda: Prepared(turn, {"tokens_per_second": 8}, times_itself=True)))["it"]

    assert len(turns) == 2  # three samples of a second and a half in all, none to warm up
    assert found.seconds == [0.25, 0.75] * 2
    assert found.phases == pytest.approx({"a": 0.4, "b": 0.05})
    assert found.metrics == {"tokens_per_second": 16}


@pytest.mark.parametrize("calls_before", [0, 2], ids=["at once", "while timed"])
def test_who_fails_says_why_and_all_are_closed_and_what_they_shared_is_released(calls_before):
    done: list[str] = []
    bad = failing("bad", RuntimeError("boom"), calls_before, close=lambda: done.append("bad"))
    good = entrant("good", [], close=lambda: done.append("good"))

    found = outcome(bad, good, release=lambda: done.append("shared"))

    assert (found["bad"].status, found["bad"].reason) == (FAILED, "RuntimeError: boom")
    assert (found["bad"].time, found["bad"].seconds) == (None, [])
    assert found["good"].status == OK
    assert done == ["bad", "good", "shared"]


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


def test_who_breaks_the_device_is_named_and_what_was_measured_is_kept(monkeypatch):
    def give_back_memory(device: torch.device) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(contest_module.measure, "give_back_memory", give_back_memory)
    bad = failing("bad", RuntimeError("illegal memory access"), 1)
    contest = Contest({}, [entrant("good", []), bad], CPU, memory=False)

    with pytest.raises(DeviceLost, match="bad broke the device: RuntimeError: illegal") as lost:
        contest.measure(time.monotonic() + 60, FEWEST)

    assert lost.value.culprit == "bad"
    assert [(one.status, len(one.seconds)) for one in contest.results()] == [(OK, 1), (FAILED, 0)]


def test_where_what_all_need_cannot_be_made_all_fail():
    def share() -> None:
        raise MemoryError

    found = outcome(entrant("a", []), entrant("b", []), share=share)

    assert {one.status for one in found.values()} == {OOM}


def test_an_interruption_keeps_what_was_measured_and_past_the_deadline_nobody_enters():
    found = outcome(entrant("a", []), failing("b", KeyboardInterrupt(), 2))
    late = outcome(entrant("a", []), seconds=-1)["a"]

    assert [(one.status, len(one.seconds)) for one in found.values()] == [(OK, 2), (OK, 1)]
    assert (late.status, late.reason) == (SKIPPED, NO_TIME)


def test_ceilings_stand_beside_every_other_and_the_share_of_them_is_the_rooflines():
    flops, transfer = "flops_per_second", "bytes_per_second"
    arithmetic = Entrant(flops, lambda: {"metrics": {flops: 50.0}}, ceiling=True)
    copy = Entrant(transfer, lambda: {"metrics": {transfer: 10.0}}, ceiling=True)

    def timed(work: dict[str, float]) -> Entrant:
        return Entrant("a", lambda: Prepared(lambda _: [(4.0, {})], work, times_itself=True))

    untimed = Entrant("bytes", lambda: {"metrics": {"counted": 3.0}, "reason": "x"})
    both = outcome(arithmetic, copy, timed({flops: 100.0, transfer: 10.0}), untimed)

    assert both["a"].ceilings == {flops: 50.0, transfer: 10.0} and both[flops].ceilings == {}
    assert both["a"].metrics == {flops: 25.0, transfer: 2.5, "share_of_ceiling": 0.5}  # by arithmetic
    assert outcome(copy, timed({flops: 1, transfer: 10}))["a"].metrics["share_of_ceiling"] == 0.25
    assert "share_of_ceiling" not in outcome(timed({flops: 100.0}))["a"].metrics
    found = both["bytes"]
    assert (found.status, found.reason, found.time, found.metrics) == (OK, "x", None, {"counted": 3.0})
