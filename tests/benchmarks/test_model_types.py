"""A tenth of the types of models, chosen by the day: all of them are seen in ten days.

`MODELS_OF=2026-11-24` chooses as that day did, and a type by its name runs on any day.
"""

from __future__ import annotations

import os
from datetime import date

import pytest

from benchmarks.model_types import (
    NOT_BUILT,
    PACKED,
    REFUSED,
    ROWS,
    Row,
    cells,
    check,
    measured,
    recorded,
    summary,
)
from benchmarks.tiny import kinds

TENTHS = 10
DAY = date.fromisoformat(os.environ.get("MODELS_OF", date.today().isoformat()))
CHOSEN = kinds()[DAY.toordinal() % TENTHS :: TENTHS]


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"{kind}-{DAY}") for kind in CHOSEN])
def test_a_type_does_what_the_record_says(kind: str) -> None:
    known = {row.kind: row for row in recorded()}
    found = check(kind, seed=DAY.toordinal())
    if kind not in known:  # of a newer transformers
        assert found.state in (REFUSED, NOT_BUILT) or "logprobs" not in found.wrong, found
        return
    before = known[kind]
    assert found.state == before.state, found
    assert not {*found.wrong} - {*before.wrong}, found
    assert found.reasons.keys() == before.reasons.keys(), found


def test_what_is_wrong_is_bold_and_the_worst_is_named() -> None:
    right = Row("one", PACKED, 1e-6, 1e-6, 1.0, 2e-6, 3e-7, True)
    wrong = Row("two", ROWS, 0.25, 1e-6, 2.0, None, None, None, {"rollout": "a | b"})
    refused, absent = Row("three", REFUSED), Row("four", NOT_BUILT)

    assert cells(right) == ["one", "packed", "1e-06", "1e-06", "1.0", "2e-06", "3e-07", "yes", ""]
    assert cells(wrong)[2] == "**2e-01**" and cells(wrong)[-1] == r"rollout: a \| b"
    told = summary([right, wrong, refused, absent])
    assert told[0].startswith("4 types, of which transformers builds 3; 2 of these train (66.7 %), 1 packed")
    assert told[1] == "worst logprobs: 2.5e-01, of two; 2 measured"


def test_a_type_that_takes_too_long_costs_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.model_types.SECONDS", 0)

    rows = [*measured(["llama", "gpt2"], seed=0)]

    assert [(row.kind, row.state) for row in rows] == [("llama", REFUSED), ("gpt2", REFUSED)]
    assert rows[0].reasons == {"loaded": "it took more than 0 s"}
