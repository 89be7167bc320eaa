"""What a session keeps, with contests made of nothing, and what its file reads back as."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import session
from benchmarks.measure import DeviceLost, Memory, Spread
from benchmarks.peers import choose_names
from benchmarks.record import Measurement, Record, read, write_json
from benchmarks.session import add_common_arguments, add_sizes, check_common, run_session


class FakeContest:
    def __init__(self, number: int, error: BaseException | None = None) -> None:
        self.shape: dict[str, Any] = {"number": number}
        self._error = error

    def measure(self, deadline: float, rounds: int) -> None:
        if self._error is not None:
            raise self._error

    def results(self) -> list[Measurement]:
        return [Measurement("ours", self.shape, reason="[bold]not markup[/nothing]")]


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, minutes=1)
    add_sizes(parser, {"at_most": (9, 2, "of it")})
    parser.set_defaults(kind="step")
    return parser.parse_args(["--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The exit code and the record of a session, in a machine that is not measured."""
    about = {"benchmark_device": "CPU", "copy_gigabytes_per_second": 1.0}
    monkeypatch.setattr(session, "environment", lambda device: dict(about))

    def run(contests: list[FakeContest], *arguments: str, **more: Any) -> tuple[int, Record]:
        found = options(tmp_path, *arguments)
        check_common(found)
        return run_session(found, contests, **more), read(tmp_path / "out.json")

    return run


def test_every_contest_is_in_the_file_and_what_follows_from_all_of_them(run):
    def conclude(found: list[Measurement]) -> list[Measurement]:
        return [Measurement("fit", {}, metrics={"points": float(len(found))})]

    code, record = run([FakeContest(1), FakeContest(2)], conclude=conclude, notes=["rows of a model"])

    assert (code, record.kind) == (0, "step")
    assert [cell.shape.get("number") for cell in record.cells] == [1, 2, None]
    assert record.cells[-1].metrics == {"points": 2.0}
    assert record.environment["benchmark_device"] == "CPU"
    assert (record.options["dtype"], record.options["at_most"]) == ("float32", 2)
    assert (record.gpu_states, record.notes) == ([None, None], ["rows of a model"])
    given = run([], "--at-most", "1,000", "--dtype", "float16")[1].options
    assert (given["dtype"], given["at_most"]) == ("float16", 1000)


@pytest.mark.parametrize(
    ("error", "code", "stopped", "culprit"),
    [
        (KeyboardInterrupt(), 130, "interrupted", None),
        (DeviceLost("it", "gone"), 1, "it broke the device: gone", "it"),
    ],
)
def test_what_ends_a_run_early_loses_nothing_that_was_measured(run, error, code, stopped, culprit):
    left, record = run([FakeContest(1), FakeContest(2, error), FakeContest(3)])

    assert left == code
    assert [cell.shape["number"] for cell in record.cells] == [1, 2]
    assert (record.stopped, record.culprit) == (stopped, culprit)
    assert record.not_measured == [{"number": 3}]


def test_without_time_nothing_is_measured_and_the_record_says_so(run, capsys):
    code, record = run([FakeContest(1)], "--minutes", "0")

    assert (code, record.not_measured) == (0, [{"number": 1}])
    assert "the time budget is spent: 1 shapes not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--minutes", "-1"], "--minutes"), (["--json", "/no/such/x.json"], "folder")]
)
def test_a_value_that_cannot_be_used_is_named(tmp_path, arguments, named, capsys):
    with pytest.raises(ValueError, match=named):
        check_common(options(tmp_path, *arguments))
    with pytest.raises(SystemExit):
        options(tmp_path, "--repeats", "0")
    assert "--repeats: must be at least 1" in capsys.readouterr().err


def test_names_are_chosen_by_words_and_an_unknown_word_is_an_error():
    assert choose_names(["ours", "TRL"], ["trl"]) == ["TRL"]
    assert choose_names(["ours", "TRL"], None) == ["ours", "TRL"]
    with pytest.raises(ValueError, match="--impl 'verl'"):
        choose_names(["ours", "TRL"], ["verl"])


def test_measurements_survive_the_file_with_their_nan(tmp_path):
    one = Measurement(
        "ours",
        {"model": "toy", "tokens": 5},
        seconds=[0.1, 0.2],
        time=Spread(150.0, 125.0, 175.0, 2),
        memory=Memory(None, 7),
        accuracy={"logprob": float("inf")},
        metrics={"mfu": float("nan")},
    )
    record = Record(
        "step", [one], {"command": ["x"]}, not_measured=[{"tokens": 6}], stopped="interrupted", culprit="it"
    )

    write_json(tmp_path / "step.json", record)

    assert repr(read(tmp_path / "step.json")) == repr(record)  # as text, where NaN equals itself


@pytest.mark.parametrize("kind", ["head", "step", "train", "group", "rollout"])
def test_the_checked_in_records_are_read(kind):
    record = read(Path(session.__file__).parent / "results" / f"{kind}_cpu.json")

    assert record.kind == kind and record.cells


@pytest.mark.parametrize("text", ["", '{"schema": 2}', '{"schema": 1, "kind": "step", "cells": [{"x": 1}]}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)

    with pytest.raises(ValueError, match=r"other\.json is no benchmark record"):
        read(tmp_path / "other.json")
