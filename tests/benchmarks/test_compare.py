"""Two records: what counts as a change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.compare import changes, noise
from benchmarks.measure import Memory, Spread, summarise
from benchmarks.record import Measurement, Record, write_json

HERE = {"benchmark_device": "here", "versions": {"torch": "2.13.0"}}
BEFORE = Measurement(
    "ours",
    {"tokens": 48, "dtype": "float32"},
    time=Spread(10.0, 9.8, 10.2, 20),
    memory=Memory(100 << 20, 120 << 20),
    accuracy={"logprob": 1e-6, "hidden_gradient": 2e-3},
)


def write(path: Path, *cells: Measurement, kind: str = "kernels", environment: dict | None = None) -> str:
    write_json(path, Record(kind, list(cells), environment or HERE))
    return str(path)


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (replace(BEFORE, time=Spread(11.5, 11.2, 11.8, 20)), "ms"),
        (replace(BEFORE, memory=Memory(140 << 20, None)), "MiB"),
        (replace(BEFORE, accuracy={"logprob": 1e-6, "hidden_gradient": 9e-3}), "hidden gradient"),
        (replace(BEFORE, accuracy={"logprob": float("nan")}), "logprob"),
        (replace(BEFORE, status="oom", time=None), "oom"),
        (replace(BEFORE, status="failed", reason="RuntimeError: boom", time=None), "boom"),
    ],
)
def test_a_regression_is_found_and_its_opposite_is_an_improvement(now: Measurement, what: str):
    ((worse, text),) = changes(BEFORE, now)
    ((worse_again, _),) = changes(now, BEFORE)

    assert worse and not worse_again
    assert what in text


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        replace(BEFORE, time=Spread(10.6, 10.1, 11.0, 20)),  # within the spread
        replace(BEFORE, time=Spread(11.5, 11.2, 11.8, 3)),  # three samples tell little
        replace(BEFORE, time=Spread(10.25, 10.24, 10.26, 20)),  # too small to matter
        replace(BEFORE, memory=Memory((100 << 20) + 512, None)),
        replace(BEFORE, memory=Memory(100 << 20, 400 << 20)),  # torch's own count is the better one
        replace(BEFORE, accuracy={"logprob": 2e-7, "hidden_gradient": 2.2e-3}),
    ],
)
def test_noise_is_no_change(now: Measurement):
    assert list(changes(BEFORE, now)) == []


def test_of_the_largest_group_any_difference_counts_and_its_time_does_not():
    then = replace(BEFORE, metrics={"largest_group": 8.0})
    now = replace(then, metrics={"largest_group": 6.0}, time=Spread(99.0, 98.0, 100.0, 20))

    assert list(changes(then, now)) == [(True, "largest group 8 → 6")]
    assert list(changes(now, then)) == [(False, "largest group 6 → 8")]


@pytest.mark.parametrize("samples", [3, 9, 25])
def test_two_runs_of_the_same_noise_are_rarely_told_apart(samples):
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    runs = torch.randn(2, 2000, samples, generator=torch.Generator().manual_seed(seed)) + 20
    spreads = [[summarise(run.tolist()) for run in half] for half in runs]

    apart = [abs(a.median - b.median) > noise(a, b) for a, b in zip(*spreads, strict=True)]

    assert sum(apart) < 60  # one in a hundred is 20, give or take 4.4


def test_where_torch_counts_no_memory_the_system_does_with_a_wider_margin():
    then = replace(BEFORE, memory=Memory(None, 200 << 20))

    assert list(changes(then, replace(BEFORE, memory=Memory(None, 225 << 20)))) == []
    assert list(changes(then, replace(BEFORE, memory=Memory(None, 260 << 20)))) == [(True, "200 → 260 MiB")]


def test_the_command_fails_on_a_regression_alone(tmp_path, capsys):
    before = write(tmp_path / "before.json", BEFORE)
    after = write(tmp_path / "after.json", replace(BEFORE, time=Spread(20.0, 19.0, 21.0, 20)))

    assert main(["compare", before, after]) == 1
    assert "REGRESSION: ours: 10.000 → 20.000 ms, +100.0%" in capsys.readouterr().out
    assert main(["compare", after, before]) == 0
    assert "improvement: ours" in capsys.readouterr().out
    assert main(["compare", before, before]) == 0
    assert "1 measurements in both; 0 regressions" in capsys.readouterr().out


def test_what_was_not_measured_in_both_runs_is_not_compared(tmp_path, capsys):
    slow = replace(BEFORE, time=Spread(30.0, 29.0, 31.0, 20))
    elsewhere = [replace(slow, shape={"tokens": 96}), replace(slow, implementation="TRL")]
    before = write(tmp_path / "before.json", BEFORE, replace(BEFORE, implementation="TRL", status="skipped"))
    after = write(tmp_path / "after.json", replace(BEFORE, status="skipped", time=None), *elsewhere)

    assert main(["compare", before, after]) == 0
    assert "0 measurements in both, 3 skipped or in one alone" in capsys.readouterr().out


def test_another_machine_and_other_versions_are_said(tmp_path, capsys):
    there = {"benchmark_device": "there", "versions": {"torch": "2.14.0", "trl": "1.16.0"}}
    before = write(tmp_path / "before.json", BEFORE)
    after = write(tmp_path / "after.json", BEFORE, environment=there)

    assert main(["compare", before, after]) == 0
    printed = capsys.readouterr().out
    assert "different machines, here and there" in printed
    assert "torch: 2.13.0 → 2.14.0" in printed
    assert "trl: absent → 1.16.0" in printed


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"product_seconds": 1.0}, {"product_seconds": 1.5}),
        ({"bytes_per_second": 6e9}, {"bytes_per_second": 4e9}),
    ],
)
def test_a_machine_that_became_slower_is_told_by_its_ceilings(tmp_path, capsys, then, now):
    before = write(tmp_path / "before.json", replace(BEFORE, ceilings=then))
    after = write(tmp_path / "after.json", replace(BEFORE, ceilings=now))

    assert main(["compare", before, after]) == 0
    assert "took 1.50 times as long" in capsys.readouterr().out


def test_records_of_two_subcommands_are_refused(tmp_path, capsys):
    kernels = write(tmp_path / "kernels.json", BEFORE)
    step = write(tmp_path / "step.json", BEFORE, kind="step")

    assert main(["compare", kernels, step]) == 2
    assert "of `step`" in capsys.readouterr().err


def test_a_file_that_is_no_record_is_named(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[]")

    assert main(["compare", str(tmp_path / "other.json"), str(tmp_path / "other.json")]) == 2
    assert "other.json is no benchmark record" in capsys.readouterr().err
