"""The tuner's decisions, with measurements made up."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks import tune
from grpo_fast.head import tuning

TABLE = tuning.load_tables()["sm_90"]
SIZES = TABLE.sizes("half", 2048, True)


class Bench:
    """Answers from a dictionary of change to (milliseconds, fault); what it does not hold is slower."""

    def __init__(self, answers: dict[str, tuple[float, str | None]]) -> None:
        self.answers = answers
        self.best = 10.0

    def compare(self, stage, incumbent, candidate):
        for key, (taken, fault) in self.answers.items():
            field, value = key.split("=")
            if str(getattr(candidate.sparse, field)) == value != str(getattr(incumbent.sparse, field)):
                before, self.best = self.best, self.best if fault else min(self.best, taken)
                return before, taken, fault
        return self.best, 2 * self.best, None


def test_a_change_is_kept_when_it_is_right_and_faster_by_more_than_noise():
    bench = Bench({"pair_rows=64": (9.0, None), "weight_warps=4": (5.0, "relative error 1"),
                   "weight_stages=4": (8.95, None)})  # fmt: skip

    found, log = tune.tune_shape(bench, SIZES, "sm_90", time.monotonic() + 60)

    assert found == replace(SIZES, sparse=replace(SIZES.sparse, pair_rows=64))
    assert [entry["candidate"] for entry in log if entry["kept"]] == ["pairs: pair_rows=64"]
    assert {entry["fault"] for entry in log} == {None, "relative error 1"}

    assert tune.tune_shape(Bench({}), SIZES, "sm_90", time.monotonic() - 1) == (SIZES, [])


def test_a_measured_table_reads_back_and_replaces_only_the_rules_it_measured(tmp_path):
    better = replace(SIZES, sparse=replace(SIZES.sparse, pair_rows=64))
    path, about = tmp_path / "sm_90.json", {"device": "a GPU"}

    tune.write_table(path, TABLE, {tune.SHAPES[0]: SIZES, tune.SHAPES[3]: SIZES}, about)
    tune.write_table(path, tuning.read_table(path), {tune.SHAPES[0]: better}, about)

    found = tuning.read_table(path)
    assert found.sizes("half", 2048, True) == better
    assert found.sizes("half", 2048, False) == found.sizes("half", 8192, True) == SIZES
    assert [rule.measured for rule in found.rules] == [False, True, True, False]


def test_a_table_that_could_not_be_read_back_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="no rule for every half shape"):
        tune.write_table(tmp_path / "sm_90.json", replace(TABLE, rules=TABLE.rules[:1]), {}, {})
    assert not list(tmp_path.iterdir())


def test_a_tile_that_the_plan_would_not_take_is_no_candidate(monkeypatch):
    monkeypatch.setattr(tune, "CANDIDATES", {tune.FORWARD: ({"stages": 5}, {"stages": 3})})

    assert [change for _, change, _ in tune.candidates(SIZES, "sm_90")] == [{"stages": 3}]


@pytest.mark.parametrize("architecture", sorted(tuning.SHARED_MEMORY))
def test_every_candidate_differs_from_what_is_shipped_and_fits_the_architecture(architecture):
    sizes = tuning.load_tables()[architecture].sizes("half", 2048, True)

    found = list(tune.candidates(sizes, architecture))

    assert len({(stage, repr(change)) for stage, change, _ in found}) == len(found) > 10
    assert ({stage for stage, _, _ in found} == set(tune.CANDIDATES)) == (architecture in ("sm_90", "sm_100"))


def test_what_is_shipped_is_compiled_before_any_candidate(monkeypatch):
    compiled = []

    def compile_one(architecture, shape, sizes, exact):
        compiled.append(sizes)
        return ["spills"] if sizes.sparse.pair_rows != SIZES.sparse.pair_rows else []

    monkeypatch.setattr(tune, "compile_one", compile_one)
    monkeypatch.setattr(tune, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))

    found = tune.compile_all("sm_90", dict.fromkeys(tune.SHAPES[:2], SIZES), 1)

    assert compiled[:4] == [SIZES] * 4 and SIZES not in compiled[4:]
    assert found == {shape: ["spills"] for shape in tune.SHAPES[:2]}
