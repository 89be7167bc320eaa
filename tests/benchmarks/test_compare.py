"""Two records: what counts as a change."""

from __future__ import annotations

from dataclasses import replace

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


def record(*cells: Measurement) -> Record:
    return Record("head", list(cells), HERE)


def mib(allocator: int | None, driver: int | None = None) -> Memory:
    return Memory(*(None if count is None else count << 20 for count in (allocator, driver)))


GROUP = replace(BEFORE, metrics={"largest_group": 8.0})
ON_CPU = replace(BEFORE, memory=mib(None, 200))


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        (BEFORE, replace(BEFORE, time=Spread(11.5, 11.2, 11.8, 20)), "10.000 → 11.500 ms"),
        (BEFORE, replace(BEFORE, memory=mib(140)), "100 → 140 MiB"),
        (ON_CPU, replace(BEFORE, memory=mib(None, 260)), "200 → 260 MiB"),
        (BEFORE, replace(BEFORE, accuracy={"logprob": 1e-6, "hidden_gradient": 9e-3}), "hidden gradient"),
        (BEFORE, replace(BEFORE, accuracy={"logprob": float("nan")}), "logprob"),
        (BEFORE, replace(BEFORE, status="oom", time=None), "oom"),
        (BEFORE, replace(BEFORE, status="failed", reason="RuntimeError: boom", time=None), "boom"),
        # Of the largest group any difference counts, and its time does not.
        (GROUP, replace(BEFORE, metrics={"largest_group": 6.0}, time=Spread(99.0, 98.0, 100.0, 20)), "8 → 6"),
    ],
)
def test_a_regression_is_found_and_its_opposite_is_an_improvement(before, now, what):
    ((worse, text),) = changes(before, now)
    ((worse_again, _),) = changes(now, before)

    assert worse and not worse_again
    assert what in text


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (BEFORE, BEFORE),
        (BEFORE, replace(BEFORE, time=Spread(10.6, 10.1, 11.0, 20))),  # within the spread
        (BEFORE, replace(BEFORE, time=Spread(11.5, 11.2, 11.8, 3))),  # three samples tell little
        (BEFORE, replace(BEFORE, time=Spread(10.25, 10.24, 10.26, 20))),  # too small to matter
        (BEFORE, replace(BEFORE, memory=Memory((100 << 20) + 512, None))),
        (BEFORE, replace(BEFORE, memory=mib(100, 400))),  # torch's own count is the better one
        (ON_CPU, replace(BEFORE, memory=mib(None, 225))),
        (BEFORE, replace(BEFORE, accuracy={"logprob": 2e-7, "hidden_gradient": 2.2e-3})),
    ],
)
def test_noise_is_no_change(before, now):
    assert list(changes(before, now)) == []


def test_two_runs_of_the_same_noise_are_rarely_told_apart(seed):
    for samples in (3, 9, 25):
        runs = torch.randn(2, 1000, samples, generator=torch.Generator().manual_seed(seed)) + 20
        spreads = [[summarise(run.tolist()) for run in half] for half in runs]

        apart = [abs(a.median - b.median) > noise(a, b) for a, b in zip(*spreads, strict=True)]

        assert sum(apart) < 35  # one in a hundred is 10, give or take 3.1


SLOW = replace(BEFORE, time=Spread(20.0, 19.0, 21.0, 20))
ABSENT = replace(BEFORE, status="skipped", time=None)
THERE = {"benchmark_device": "there", "versions": {"torch": "2.14.0", "trl": "1.16.0"}}


@pytest.mark.parametrize(
    ("before", "after", "code", "printed"),
    [
        (record(BEFORE), record(BEFORE), 0, ["1 measurements in both; 0 regressions"]),
        (record(BEFORE), record(SLOW), 1, ["REGRESSION: ours: 10.000 → 20.000 ms, +100.0% (N 48, float32)"]),
        (
            record(BEFORE, replace(ABSENT, implementation="TRL")),
            record(ABSENT, replace(SLOW, shape={"tokens": 96}), replace(SLOW, implementation="TRL")),
            0,
            ["0 measurements in both, 3 skipped or in one alone"],
        ),
        (
            record(BEFORE),
            Record("head", [BEFORE], THERE),
            0,
            ["different machines, here and there", "torch: 2.13.0 → 2.14.0", "trl: absent → 1.16.0"],
        ),
        (record(BEFORE), Record("step", [BEFORE], HERE), 2, ["of `head`", "of `step`"]),
        (record(BEFORE), [], 2, ["after.json is no benchmark record"]),
    ],
)
def test_the_command_fails_on_a_regression_alone_and_says_what_else_differs(
    tmp_path, capsys, before, after, code, printed
):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, document in zip(paths, (before, after), strict=True):
        write_json(path, document)

    assert main(["compare", *map(str, paths)]) == code
    captured = capsys.readouterr()
    assert all(text in captured.out + captured.err for text in printed)
