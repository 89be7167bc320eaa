"""What a session keeps, with bouts made of nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import DeviceLost
from benchmarks.peers import choose_names
from benchmarks.record import Measurement, read
from benchmarks.session import add_common_arguments, check_common, run_session


class FakeBout:
    def __init__(self, number: int, error: BaseException | None = None) -> None:
        self.shape: dict[str, Any] = {"number": number}
        self._error = error

    def measure(self, limits: object) -> None:
        if self._error is not None:
            raise self._error

    def results(self) -> list[Measurement]:
        return [Measurement("ours", self.shape, reason="[bold]not markup[/nothing]")]


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, minutes=1)
    return parser.parse_args(["--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])


def run(tmp_path: Path, bouts: list[FakeBout], *arguments: str, **more: Any) -> int:
    found = options(tmp_path, *arguments)
    return run_session("step", found, check_common(found), bouts, **more)


def test_every_bout_is_in_the_file_with_where_and_how_it_was_measured(tmp_path):
    code = run(tmp_path, [FakeBout(1), FakeBout(2)])

    record = read(tmp_path / "out.json")
    assert code == 0
    assert [cell.shape["number"] for cell in record.cells] == [1, 2]
    assert record.environment["versions"]["torch"] == torch.__version__
    assert record.options["dtype"] == "float32"
    assert record.gpu_states == [None, None]


@pytest.mark.parametrize(
    ("error", "code", "stopped"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (DeviceLost("it", "gone"), 1, "it broke the device: gone"),
    ],
)
def test_what_ends_a_run_early_loses_nothing_that_was_measured(tmp_path, error, code, stopped):
    assert run(tmp_path, [FakeBout(1), FakeBout(2, error), FakeBout(3)]) == code

    record = read(tmp_path / "out.json")
    assert [cell.shape["number"] for cell in record.cells] == [1, 2]
    assert record.stopped == stopped
    assert record.not_measured == [{"number": 3}]


def test_without_time_nothing_is_measured_and_the_record_says_so(tmp_path, capsys):
    assert run(tmp_path, [FakeBout(1)], "--minutes", "0") == 0

    assert read(tmp_path / "out.json").not_measured == [{"number": 1}]
    assert "the time budget is spent: 1 shapes not measured" in capsys.readouterr().out


def test_conclusions_follow_from_all_measurements(tmp_path):
    def conclude(found: list[Measurement]) -> list[Measurement]:
        return [Measurement("fit", {}, metrics={"points": float(len(found))})]

    run(tmp_path, [FakeBout(1), FakeBout(2)], conclude=conclude)

    assert read(tmp_path / "out.json").cells[-1].metrics == {"points": 2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "-1"], "--minutes must be at least 0"),
        (["--json", "/no/such/folder/x.json"], "its folder does not exist"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_common(options(tmp_path, *arguments))


def test_names_are_chosen_by_words_and_an_unknown_word_is_an_error():
    assert choose_names(["ours", "TRL"], ["trl"]) == ["TRL"]
    assert choose_names(["ours", "TRL"], None) == ["ours", "TRL"]
    with pytest.raises(ValueError, match="--impl 'verl' is part of no implementation's name"):
        choose_names(["ours", "TRL"], ["verl"])
