"""Two records: what counts as a change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.accuracy import Accuracy
from benchmarks.cell import Cell, Result
from benchmarks.compare import changes
from benchmarks.problem import Setting
from benchmarks.record import load, save
from benchmarks.timing import Memory, Spread

SETTING = Setting("peaked", 48, 32, 300, "forward_backward", True, "float32")
RESULT = Result(
    "ours",
    "ok",
    time=Spread(10.0, 9.8, 10.2, 20),
    memory=Memory(100 << 20, 120 << 20),
    accuracy=Accuracy(1e-6, 2e-3, 2e-3),
)


def cell(result: Result) -> Cell:
    return Cell(SETTING, "random rows", 1, 4096, Spread(5.0, 4.9, 5.1, 20), [result])


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (replace(RESULT, time=Spread(11.5, 11.2, 11.8, 20)), "ms"),
        (replace(RESULT, memory=Memory(140 << 20, None)), "MiB"),
        (replace(RESULT, accuracy=Accuracy(1e-6, 9e-3, 2e-3)), "hidden gradient"),
        (replace(RESULT, accuracy=Accuracy(float("nan"), 2e-3, 2e-3)), "logprob"),
        (replace(RESULT, state="out of memory", time=None), "out of memory"),
    ],
)
def test_a_regression_is_found_and_its_opposite_is_an_improvement(now, what):
    (worse,) = changes([cell(RESULT)], [cell(now)])
    (better,) = changes([cell(now)], [cell(RESULT)])

    assert worse.worse and what in worse.what
    assert not better.worse


@pytest.mark.parametrize(
    "now",
    [
        RESULT,
        replace(RESULT, time=Spread(10.6, 10.1, 11.0, 20)),  # the quartiles overlap
        replace(RESULT, time=Spread(10.25, 10.24, 10.26, 20)),  # too small to matter
        replace(RESULT, memory=Memory((100 << 20) + 512, None)),
        replace(RESULT, accuracy=Accuracy(2e-7, 2.2e-3, 2e-3)),
        replace(RESULT, state="skipped", time=None),
        replace(RESULT, state="no time left", time=None),
    ],
)
def test_noise_and_what_was_not_measured_are_no_changes(now):
    assert changes([cell(RESULT)], [cell(now)]) == []


def test_the_command_fails_on_a_regression_alone(tmp_path, capsys):
    slower = replace(RESULT, time=Spread(20.0, 19.0, 21.0, 20))
    about = {"environment": {"benchmark_device": "here"}}
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    save(before, [cell(RESULT)], **about)
    save(after, [cell(slower)], **about)

    assert main(["compare", str(before), str(after)]) == 1
    assert "REGRESSION: ours" in capsys.readouterr().out
    assert main(["compare", str(after), str(before)]) == 0
    assert "improvement: ours" in capsys.readouterr().out


def test_a_record_survives_the_file_with_its_nan(tmp_path):
    wrong = replace(RESULT, accuracy=Accuracy(float("nan"), None, float("inf")))
    save(tmp_path / "record.json", [cell(wrong)], environment={})

    ((found,), about) = load(tmp_path / "record.json")

    assert repr(found) == repr(cell(wrong))
    assert about["environment"] == {}


def test_a_file_that_is_no_record_is_named(tmp_path, capsys):
    (tmp_path / "other.json").write_text("[]")

    assert main(["compare", str(tmp_path / "other.json"), str(tmp_path / "other.json")]) == 2
    assert "other.json is no benchmark record" in capsys.readouterr().err
