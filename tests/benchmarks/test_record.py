from __future__ import annotations

import pytest

from benchmarks.measure import Memory, Spread
from benchmarks.record import Measurement, Record, read, write_json


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

    write_json(tmp_path / "step.json", record)

    assert repr(read(tmp_path / "step.json")) == repr(record)  # as text, where NaN equals itself


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1, "kind": "step", "cells": [{"x": 1}]}']
)
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"other\.json is no benchmark record"):
        read(path)
