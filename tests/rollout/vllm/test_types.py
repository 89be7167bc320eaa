"""One recorded type of model a day runs in vLLM, as others without it in `benchmarks/test_model_types.py`."""

from __future__ import annotations

import os
from datetime import date

import pytest

from benchmarks.tables import DASH
from benchmarks.vllm_types import Row, cells, check, recorded

DAY = date.fromisoformat(os.environ.get("MODELS_OF", date.today().isoformat()))


KINDS = sorted(recorded())


@pytest.mark.parametrize("kind", [pytest.param(KINDS[DAY.toordinal() % len(KINDS)], id=f"{DAY}")])
def test_vllm_draws_from_a_type_what_the_record_says(kind: str, on_vllms_cpu) -> None:
    before, found = recorded()[kind], check(kind, parts=("start",))

    assert not {*found.wrong} - {*before.wrong}, found
    assert ("start" in found.reasons) == ("start" in before.reasons), found


def test_what_is_wrong_is_bold_and_a_refusal_has_its_words() -> None:
    row = Row("qwen3_moe", "portable", 1e-4, float("nan"), 0.5, None, {"exported": "a | b"})
    alike = Row("olmoe", reasons={"start": "no", "merged": "no"})

    shown = ["qwen3_moe", "reloaded", "1e-04", "**nan**", "**5e-01**", DASH, r"exported: a \| b"]
    assert cells(row) == shown
    assert cells(alike)[1:] == [*[DASH] * 5, "start, merged: no"]
