from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks import group
from benchmarks.__main__ import main
from benchmarks.group import Outcome, Probe, Search, predict_group, preload, run_probe
from benchmarks.measure import FAILED, NO_TIME, OK, OOM, SKIPPED, Memory
from benchmarks.record import read

PROBE = Probe("ours", "toy", None, 0, 4, 4, "float32", "cpu", None, {})
ANYTHING = {"lora_rank": None, "freeze_head": False, "gradient_checkpointing": False}


def search(limit: int, *, largest: int = 1024) -> tuple[Search, list[int]]:
    """Groups up to the limit fit."""
    tried: list[int] = []

    def attempt(probe: Probe) -> Outcome:
        tried.append(probe.size)
        return Outcome(OK if probe.size <= limit else OOM, seconds=1.0, memory=Memory(None, probe.size))

    return Search(PROBE, largest, attempt), tried


def never() -> bool:
    return False


def test_the_largest_group_that_fits_is_found_in_few_tries():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    limit = random.Random(seed).randint(2, 1024)

    found, tried = search(limit)
    found.run(never)

    metrics = found.result({}).metrics
    assert metrics["largest_group"] == limit
    assert metrics.get("smallest_that_fails", limit + 1) == limit + 1
    assert found.finished == (limit < 1024)
    assert len(tried) == len(set(tried)) <= 20  # ten doublings, ten halvings


def test_a_group_of_every_size_stops_at_the_largest_that_is_tried():
    found, tried = search(10**6, largest=24)
    found.run(never)

    assert tried == [2, 4, 8, 16, 24]
    assert found.result({}).metrics == {"largest_group": 24.0}
    assert found.result({}).reason.startswith("at least")


def test_a_search_that_ran_out_of_time_says_at_least():
    found, tried = search(100)
    found.run(lambda: len(tried) == 3)

    assert found.result({}).metrics == {"largest_group": 8.0}
    assert found.result({}).reason.startswith("at least")


@pytest.mark.parametrize(
    ("outcome", "stop", "status", "reason"),
    [
        (Outcome(OOM), False, OOM, "not even two completions fit"),
        (Outcome(FAILED, "RuntimeError: no"), False, FAILED, "RuntimeError: no"),
        (Outcome(OK), True, SKIPPED, NO_TIME),
    ],
)
def test_a_search_without_any_group_that_fits_says_why(outcome, stop, status, reason):
    found = Search(PROBE, 64, lambda _: outcome)
    found.run(lambda: stop)

    assert (found.result({}).status, found.result({}).reason) == (status, reason)


def test_the_command_writes_what_fits_and_what_the_planner_predicts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        group, "run_probe", lambda probe, timeout: Outcome(OK if probe.size <= 5 else OOM, seconds=1.0)
    )
    monkeypatch.setattr(group, "predict_group", lambda probe, device: 7)
    out = tmp_path / "group.json"

    assert main(["group", "--device", "cpu", "--model", "toy", "--impl", "ours", "--json", str(out)]) == 0

    measured, predicted = read(out).cells
    assert measured.metrics == {"largest_group": 5.0, "smallest_that_fails": 6.0}
    assert (predicted.implementation, predicted.metrics) == ("ours, predicted", {"largest_group": 7.0})


def test_a_probe_runs_in_a_process_of_its_own_and_exceeding_the_budget_is_out_of_memory():
    preload(["ours"])
    probe = Probe("ours", "toy", None, 2, 4, 4, "float32", "cpu", 1 << 34, ANYTHING)

    fits = run_probe(probe, timeout=600)
    too_much = run_probe(Probe(**vars(probe) | {"budget": 1 << 20}), timeout=600)

    assert (fits.status, fits.reason) == (OK, "")
    assert fits.seconds > 0
    assert too_much.status == OOM


def test_a_probe_that_fails_says_why():
    probe = Probe("ours", "toy", None, 2, 4, 4, "float32", "cpu", None, {"no_such_option": 1})

    outcome = run_probe(probe, timeout=600)

    assert outcome.status == FAILED
    assert "no_such_option" in outcome.reason


def test_the_planner_predicts_more_with_more_memory():
    probe = Probe("ours", "toy", None, 0, 16, 64, "float32", "cpu", 1 << 30, ANYTHING)
    small = predict_group(probe, torch.device("cpu"))
    large = predict_group(Probe(**vars(probe) | {"budget": 1 << 32}), torch.device("cpu"))

    assert 0 < small < large
