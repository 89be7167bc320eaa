"""Turns, ceilings and failures of a contest, with entrants made of nothing."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.cell import FEWEST, Limits
from benchmarks.contest import Contest, Entrant, Prepared, Work
from benchmarks.peers import Unsupported
from benchmarks.record import FAILED, OK, OOM, SKIPPED

CPU = torch.device("cpu")


def limits(rounds: int = FEWEST, seconds: float = 60.0) -> Limits:
    return Limits(time.monotonic() + seconds, rounds)


def entrant(name: str, calls: list[str], **options: object) -> Entrant:
    return Entrant(name, lambda: Prepared(lambda _: calls.append(name), **options))


def failing(name: str, error: BaseException, calls_before: int = 0) -> Entrant:
    left = [calls_before]

    def run(_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return Entrant(name, lambda: Prepared(run))


def outcome(*entrants: Entrant, rounds: int = FEWEST) -> dict[str, object]:
    contest = Contest({}, entrants, CPU, memory=False)
    contest.measure(limits(rounds))
    return {found.implementation: found for found in contest.results()}


def test_entrants_take_turns_and_the_warm_up_does_not_count():
    calls: list[str] = []

    found = outcome(entrant("a", calls), entrant("b", calls))

    assert calls == ["a", "b"] + ["a", "b"] * FEWEST
    assert len(found["a"].seconds) == FEWEST
    assert found["a"].time.samples == FEWEST


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("tried to allocate a vocabulary"), OOM, ""),
        (MemoryError(), OOM, ""),
        (ImportError("no such library"), SKIPPED, "not installed: no such library"),
        (Unsupported("needs a CUDA device"), SKIPPED, "needs a CUDA device"),
        (RuntimeError("kernel exploded"), FAILED, "RuntimeError: kernel exploded"),
    ],
)
@pytest.mark.parametrize("calls_before", [0, 2], ids=["at once", "while timed"])
def test_an_entrant_that_fails_says_why_and_the_others_are_measured(error, status, reason, calls_before):
    found = outcome(failing("bad", error, calls_before), entrant("good", []))

    assert (found["bad"].status, found["bad"].reason) == (status, reason)
    assert found["bad"].time is None
    assert found["good"].status == OK


def test_an_interruption_keeps_what_was_measured():
    contest = Contest({}, [entrant("a", []), failing("b", KeyboardInterrupt(), 2)], CPU, memory=False)

    with pytest.raises(KeyboardInterrupt):
        contest.measure(limits())

    first, second = contest.results()
    assert (first.status, len(first.seconds)) == (OK, 2)
    assert (second.status, len(second.seconds)) == (OK, 1)


def test_past_the_deadline_nobody_enters():
    contest = Contest({}, [entrant("a", [])], CPU)

    contest.measure(limits(seconds=-1))

    assert (contest.results()[0].status, contest.results()[0].reason) == (SKIPPED, "no time left")


def test_the_share_of_the_ceiling_is_the_rooflines():
    work = Work(flops=100.0, bytes=10.0)
    bounds = {"flops_per_second": 50.0, "bytes_per_second": 10.0}

    assert work.share(4.0, bounds) == pytest.approx(0.5)  # 2 s of arithmetic, 1 s of traffic
    assert work.share(4.0, {"bytes_per_second": 10.0}) == pytest.approx(0.25)
    assert work.share(4.0, {}) is None


def test_ceilings_come_first_and_stand_beside_every_other():
    ceiling = Entrant("copy", lambda: Prepared(lambda _: None, Work(bytes=1.0)), ceiling=True)

    found = outcome(entrant("a", [], work=Work(bytes=1.0)), ceiling)

    assert list(found) == ["copy", "a"]
    rate = found["copy"].metrics["bytes_per_second"]
    assert found["a"].ceilings == {"bytes_per_second": rate}
    assert found["a"].metrics["share_of_ceiling"] == pytest.approx(
        found["a"].metrics["bytes_per_second"] / rate
    )


def test_whatever_was_prepared_is_closed():
    closed: list[str] = []
    entrants = [
        entrant("a", [], close=lambda: closed.append("a")),
        Entrant("b", lambda: Prepared(_raise, close=lambda: closed.append("b"))),
    ]

    outcome(*entrants)

    assert sorted(closed) == ["a", "b"]


def _raise(_: object) -> None:
    raise RuntimeError("no")
