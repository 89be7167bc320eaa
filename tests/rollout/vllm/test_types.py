"""One recorded type of model a day runs in vLLM, as others without it in `benchmarks/test_model_types.py`."""

from __future__ import annotations

import os
from datetime import date

import pytest

from benchmarks.vllm_types import TABLE, check

DAY = date.fromisoformat(os.environ.get("MODELS_OF", date.today().isoformat()))


KINDS = sorted(TABLE.recorded())


@pytest.mark.parametrize("kind", [pytest.param(KINDS[DAY.toordinal() % len(KINDS)], id=f"{DAY}")])
def test_vllm_draws_from_a_type_what_the_record_says(kind: str, on_vllms_cpu) -> None:
    before, found = TABLE.recorded()[kind], check(kind, parts=("start",))

    assert not {*TABLE.wrong(found)} - {*TABLE.wrong(before)}, found
    assert ("start" in found["reasons"]) == ("start" in before["reasons"]), found
