from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import group
from benchmarks.__main__ import main
from benchmarks.group import GroupBout, Probe, predict_group, preload, run_probe
from benchmarks.measure import FAILED, NO_TIME, OK, OOM, SKIPPED
from benchmarks.record import Measurement, read
from grpo_fast.policy.config import ModelConfig

TOY = ModelConfig(path="toy", dtype="float32", device="cpu")
PROBE = Probe("ours", TOY, layers=1, prompt=4, completion=4, budget=1 << 34)


def searched(attempt: Callable[[Probe], Measurement], *, largest: int = 1024, tries: int = 99) -> GroupBout:
    bout = GroupBout({"model": "toy"}, [PROBE], largest, attempt)

    class Limits:
        passed = property(lambda _: len(bout.tried.get("ours", {})) >= tries)

    bout.measure(Limits())
    return bout


def fitting(limit: int) -> Callable[[Probe], Measurement]:
    return lambda probe: Measurement(probe.implementation, {}, OK if probe.size <= limit else OOM)


def test_the_largest_group_that_fits_is_found_in_few_tries():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    limit = random.Random(seed).randint(2, 1024)

    bout = searched(fitting(limit))

    found = bout.results()[0]
    assert found.metrics["largest_group"] == limit
    assert found.metrics.get("smallest_that_fails", limit + 1) == limit + 1
    assert found.reason.startswith("at least") == (limit == 1024)
    assert found.shape == bout.shape
    assert len(bout.tried["ours"]) <= 20  # ten doublings, ten halvings


@pytest.mark.parametrize(("largest", "tries", "best"), [(24, 5, 24.0), (1024, 3, 8.0)])
def test_a_search_that_ends_before_a_size_fails_says_at_least(largest, tries, best):
    bout = searched(fitting(10**6), largest=largest, tries=tries)

    assert list(bout.tried["ours"]) == [2, 4, 8, 16, 24][:tries]
    assert bout.results()[0].metrics == {"largest_group": best}
    assert bout.results()[0].reason.startswith("at least")


@pytest.mark.parametrize(
    ("outcome", "tries", "status", "reason"),
    [
        ((OOM, ""), 1, OOM, "not even two completions fit"),
        ((FAILED, "RuntimeError: no"), 9, FAILED, "RuntimeError: no"),
        ((OK, ""), 0, SKIPPED, NO_TIME),
    ],
)
def test_a_search_without_any_group_that_fits_says_why(outcome, tries, status, reason):
    found = searched(lambda probe: Measurement("ours", {}, *outcome), tries=tries).results()[0]

    assert (found.status, found.reason, found.shape) == (status, reason, {"model": "toy"})


def test_the_command_writes_what_fits_and_what_the_planner_predicts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(group, "run_probe", fitting(5))
    out = tmp_path / "group.json"

    assert main(["group", "--device", "cpu", "--model", "toy", "--impl", "ours", "--json", str(out)]) == 0

    measured, predicted = read(out).cells
    assert measured.metrics == {"largest_group": 5.0, "smallest_that_fails": 6.0}
    assert predicted.implementation == "ours, predicted"
    assert predicted.metrics["largest_group"] > 5


def test_a_try_runs_in_a_process_of_its_own_and_exceeding_the_budget_or_the_time_is_its_outcome():
    preload(["ours"])
    probe = replace(PROBE, size=2)

    fits = run_probe(probe)
    too_much = run_probe(replace(probe, budget=1 << 20))
    too_slow = run_probe(probe, seconds=0.01)
    broken = run_probe(replace(probe, model=TOY.model_copy(update={"path": "no such"})))

    assert (fits.status, fits.reason) == (OK, "")
    assert fits.time.median > 0
    assert too_much.status == OOM
    assert (too_slow.status, too_slow.reason) == (FAILED, "the time is up")
    assert broken.status == FAILED
    assert "no such" in broken.reason


def test_the_planner_predicts_more_with_more_memory():
    probe = replace(PROBE, prompt=16, completion=64)
    small, large = (predict_group(replace(probe, budget=budget)) for budget in (1 << 30, 1 << 32))

    assert 0 < small < large
