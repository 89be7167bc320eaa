"""A tenth of the types of models, chosen by the day: all of them are seen in ten days.

`MODELS_OF=2026-11-24` chooses as that day did, and a type by its name runs on any day.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import date

import pytest

from benchmarks.__main__ import main
from benchmarks.model_types import NOT_BUILT, PACKED, REFUSED, ROWS, TABLE, check, summary
from benchmarks.tables import DASH
from benchmarks.tiny import kinds

TENTHS = 10
DAY = date.fromisoformat(os.environ.get("MODELS_OF", date.today().isoformat()))
CHOSEN = kinds()[DAY.toordinal() % TENTHS :: TENTHS]


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"{kind}-{DAY}") for kind in CHOSEN])
def test_a_type_does_what_the_record_says(kind: str) -> None:
    before, found = TABLE.recorded().get(kind), check(kind, seed=DAY.toordinal())
    if before is None:  # of a newer transformers
        assert found["state"] in (REFUSED, NOT_BUILT) or "logprobs" not in TABLE.wrong(found), found
        return
    assert found["state"] == before["state"], found
    assert not {*TABLE.wrong(found)} - {*TABLE.wrong(before)}, found
    assert found["reasons"].keys() == before["reasons"].keys(), found


def test_what_is_wrong_is_bold_reasons_are_told_once_and_the_worst_is_named() -> None:
    numbers = {"logprobs": 1e-6, "gradients": 1e-6, "computed": 1.0}
    right = TABLE.row("one") | numbers | {"state": PACKED, "rollout": 2e-6, "planned": True}
    reasons = {"rollout": "a | b", "lora": "a | b", "planned": "no"}
    wrong = TABLE.row("two") | numbers | {"state": ROWS, "logprobs": 0.25, "reasons": reasons}
    nan = TABLE.row("three") | {"state": ROWS, "rollout": float("nan"), "planned": False}
    refused, absent = (TABLE.row(state) | {"state": state} for state in (REFUSED, NOT_BUILT))

    assert TABLE.cells(right) == ["one", "packed", "1e-06", "1e-06", "1.0", "2e-06", DASH, "yes", ""]
    assert TABLE.cells(wrong)[2] == "**2e-01**" and TABLE.cells(nan)[5:8] == ["**nan**", DASH, "no"]
    assert TABLE.cells(wrong)[-1] == r"rollout, lora: a \| b; planned: no"
    told = summary([right, wrong, refused, absent])
    assert told[0].startswith("4 types, of which transformers builds 3; 2 of these train (66.7 %), 1 packed")
    assert told[1] == "worst logprobs: 2.5e-01, of two; 2 measured"


def test_a_type_that_takes_too_long_costs_its_line_alone(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("benchmarks.model_types.TABLE", replace(TABLE, seconds=0))

    assert main(["models", "--only", "llama", "gpt2"]) == 0

    late = "process: no time left: took more than 0 s"
    assert [line.split("  ") for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["llama", late], ["gpt2", late]
    ]  # fmt: skip
