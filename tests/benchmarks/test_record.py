from __future__ import annotations

import json

import pytest

from benchmarks.cell import Cell, Result
from benchmarks.problem import Setting
from benchmarks.record import FAILED, OOM, SKIPPED, Measurement, load, read, save
from benchmarks.timing import Memory, Spread

SETTING = Setting("flat", 64, 32, 300, "forward", True, "float32")


def test_measurements_of_any_kind_survive_the_file(tmp_path):
    one = Measurement(
        "ours",
        {"model": "toy", "tokens": 5},
        seconds=[0.1, 0.2],
        time=Spread(150.0, 125.0, 175.0, 2),
        memory=Memory(None, 7),
        phases={"forward": 0.1},
        metrics={"mfu": float("nan")},
        ceilings={"flops_per_second": 1e12},
    )
    path = tmp_path / "step.json"

    save(
        path,
        [one],
        kind="step",
        environment={"command": ["x"]},
        not_measured=[{"tokens": 6}],
        stopped="interrupted",
    )
    found = read(path)

    assert (found.kind, found.stopped, found.not_measured) == ("step", "interrupted", [{"tokens": 6}])
    assert repr(found.cells) == repr([one])  # as text, where NaN equals itself


def test_a_record_from_before_the_losses_is_of_log_probabilities(tmp_path):
    path = tmp_path / "head.json"
    save(path, [Cell(SETTING, "rows", 1, 256, None, [Result("ours", "error", "why")])], environment={})
    document = json.loads(path.read_text())
    del document["cells"][0]["setting"]["loss"]
    path.write_text(json.dumps(document))

    cells, _ = load(path)

    assert cells[0].setting == SETTING
    assert read(path).cells[0].shape["loss"] == "logprob"


@pytest.mark.parametrize(
    ("state", "status"),
    [("out of memory", OOM), ("error", FAILED), ("no time left", SKIPPED), ("skipped", SKIPPED)],
)
def test_results_of_the_head_are_measurements_too(tmp_path, state, status):
    fine = Result("ours", "ok", time=Spread(2.0, 1.0, 3.0, 3), seconds=(0.001, 0.002, 0.003))
    cell = Cell(SETTING, "rows", 1, 256, Spread(1.0, 1.0, 1.0, 3), [fine, Result("peer", state, "why")])
    path = tmp_path / "head.json"

    save(path, [cell], environment={})
    found = read(path)

    assert found.kind == "head"
    ours, peer = found.cells
    assert ours.ceilings == {"product_seconds": 0.001}
    assert ours.seconds == [0.001, 0.002, 0.003]
    assert ours.shape["tokens"] == 64
    assert (peer.status, peer.reason) == (status, "why")


def test_a_record_of_before_kinds_is_one_of_the_head(tmp_path):
    path = tmp_path / "old.json"
    save(path, [Cell(SETTING, "rows", 1, 256, None, [Result("ours", "ok")])], environment={})
    document = json.loads(path.read_text())
    del document["kind"], document["cells"][0]["results"][0]["seconds"]
    path.write_text(json.dumps(document))

    assert read(path).cells[0].implementation == "ours"
    assert load(path)[0][0].results[0].seconds == ()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1, "kind": "step", "cells": [{"x": 1}]}']
)
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"other\.json is no benchmark record"):
        read(path)


def test_a_record_of_another_kind_holds_no_cells_of_the_head(tmp_path):
    path = tmp_path / "step.json"
    save(path, [], kind="step", environment={})

    with pytest.raises(ValueError, match="of the kind 'step'"):
        load(path)
