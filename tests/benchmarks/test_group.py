from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import group, step
from benchmarks.group import Probe, predict_group, run_probe, search
from benchmarks.measure import FAILED, NO_TIME, OK, OOM, SKIPPED, preload
from grpo_fast.config.policy import ModelConfig

TOY = ModelConfig(path="toy", dtype="float32", device="cpu")
PROBE = Probe("ours", TOY, layers=1, prompt=4, completion=4, budget=1 << 34)


@pytest.fixture
def searched(monkeypatch):
    """What a search finds where so many completions fit, and the sizes that it tried."""

    def searched(limit: int, largest: int = 1024, seconds: float = 60.0, share: float = 1.0, **outcome: Any):
        sizes: list[int] = []

        def attempt(probe: Probe) -> dict[str, Any]:
            sizes.append(probe.size)
            return {"status": OK if probe.size <= limit else OOM} | outcome

        monkeypatch.setattr(group, "run_probe", attempt)
        return search(PROBE, largest, time.monotonic() + seconds, share), sizes

    return searched


def test_the_largest_group_that_fits_is_found_in_few_tries(searched, seed):
    limit = random.Random(seed).randint(2, 1024)

    found, sizes = searched(limit)

    exact = {"smallest_that_fails": limit + 1} if limit < 1024 else {}
    assert found["metrics"] == {"largest_group": limit, **exact}
    assert bool(found["reason"]) == (limit == 1024)
    assert len(sizes) == len({*sizes}) <= 20  # ten doublings, ten halvings
    assert searched(limit=10**6, largest=24)[1] == [2, 4, 8, 16, 24]


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ({"limit": 1}, OOM, "not even two fit"),
        ({"limit": 1, "status": FAILED, "reason": "RuntimeError: no"}, FAILED, "RuntimeError: no"),
        ({"limit": 9, "seconds": 0.0}, SKIPPED, NO_TIME),
        ({"limit": 9, "share": 0.0}, SKIPPED, NO_TIME),  # the time that is left is the others'
    ],
)
def test_a_search_without_any_group_that_fits_says_why(searched, arguments, status, reason):
    assert searched(**arguments)[0] == {"status": status, "reason": reason}


def test_the_command_writes_what_fits_and_what_the_planner_predicts(run, monkeypatch):
    monkeypatch.setattr(group, "run_probe", lambda probe: {"status": OK if probe.size <= 5 else OOM})

    measured, predicted = run("group", "--model", "toy", "--impl", "ours").cells
    assert (measured.status, measured.reason) == (OK, "")
    assert measured.metrics == {"largest_group": 5.0, "smallest_that_fails": 6.0}
    assert predicted.implementation == "ours, predicted"
    assert predicted.metrics["largest_group"] > 5


def test_a_try_runs_in_a_process_of_its_own_and_exceeding_the_budget_is_its_outcome():
    preload(step.__name__)
    probe = replace(PROBE, size=2)

    fits = run_probe(probe)

    assert fits["status"] == OK and fits["time"].median > 0
    assert 1 << 20 < fits["memory"].driver < 1 << 29
    assert run_probe(replace(probe, budget=1 << 20))["status"] == OOM
    broken = run_probe(replace(probe, model=TOY.model_copy(update={"path": "no such"})))
    assert broken["status"] == FAILED and "no such" in broken["reason"]


def test_the_planner_predicts_more_with_more_memory():
    probe = replace(PROBE, prompt=16, completion=64)
    small, large = (predict_group(replace(probe, budget=budget)) for budget in (1 << 30, 1 << 32))

    assert 0 < small < large
