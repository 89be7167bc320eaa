from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import FAILED, OOM, SKIPPED, Memory, Spread
from benchmarks.problem import PRODUCT, Setting
from benchmarks.record import Measurement, Record, read, save

SETTING = Setting("flat", 64, 32, 300, "forward", True, "float32")


def test_measurements_survive_the_file_with_their_nan(tmp_path):
    one = Measurement(
        "ours",
        {"model": "toy", "tokens": 5},
        seconds=[0.1, 0.2],
        time=Spread(150.0, 125.0, 175.0, 2),
        memory=Memory(None, 7),
        accuracy={"logprob": float("inf")},
        phases={"forward": 0.1},
        metrics={"mfu": float("nan")},
        ceilings={"flops_per_second": 1e12},
    )
    record = Record(
        "step", [one], {"command": ["x"]}, not_measured=[{"tokens": 6}], stopped="interrupted", culprit="it"
    )

    save(tmp_path / "step.json", record)

    assert repr(read(tmp_path / "step.json")) == repr(record)  # as text, where NaN equals itself


def earlier_head(folder: Path, *results: dict[str, Any]) -> list[Measurement]:
    """Read back from a record of `head` as it was, with a cell for each setting."""
    usual = {"reason": "", "time": None, "memory": None, "accuracy": None, "certificate": None}
    spread = {"median": 2.0, "lower": 1.0, "upper": 3.0, "samples": 3}
    setting = {name: value for name, value in vars(SETTING).items() if name != "loss"}
    cell = {"setting": setting, "rows": "rows", "input_sets": 1, "output_bytes": 256, "product": spread}
    cell["results"] = [usual | result for result in results]
    path = folder / "head.json"
    path.write_text(json.dumps({"schema": 1, "environment": {}, "cells": [cell]}))
    record = read(path)
    assert record.kind == "head"
    return record.cells


def test_an_earlier_record_of_the_head_gives_measurements_and_the_product(tmp_path):
    fine = {
        "name": "ours",
        "state": "ok",
        "time": {"median": 4.0, "lower": 1.0, "upper": 9.0, "samples": 3},
        "memory": {"allocator": 5, "driver": None},
        "accuracy": {"logprob": "nan", "hidden_gradient": None},
        "certificate": {"density": 0.5},
        "seconds": [0.004],
    }

    product, ours = earlier_head(tmp_path, fine)

    flops = 2 * 64 * 32 * 300
    assert (product.implementation, product.time.median) == (PRODUCT, 2.0)
    assert ours.shape == vars(SETTING)  # of log-probabilities, where it says no loss
    assert ours.ceilings == {"product_seconds": 0.002, "flops_per_second": pytest.approx(flops / 0.002)}
    assert (ours.seconds, ours.time.median, ours.memory) == ([0.004], 4.0, Memory(5, None))
    assert repr(ours.accuracy) == "{'logprob': nan}"
    assert (ours.metrics["density"], ours.metrics["output_bytes"]) == (0.5, 256)
    assert ours.metrics["flops_per_second"] == pytest.approx(flops / 0.004)


@pytest.mark.parametrize(
    ("state", "status"),
    [("out of memory", OOM), ("error", FAILED), ("no time left", SKIPPED), ("skipped", SKIPPED)],
)
def test_what_failed_in_an_earlier_record_has_todays_status(tmp_path, state, status):
    _, found = earlier_head(tmp_path, {"name": "peer", "state": state, "reason": "why"})

    assert (found.status, found.reason) == (status, "why")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1, "kind": "step", "cells": [{"x": 1}]}']
)
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"other\.json is no benchmark record"):
        read(path)
