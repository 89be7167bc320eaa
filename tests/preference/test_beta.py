"""Beta's schedules."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from grpo_fast.config.preference import BetaConfig
from grpo_fast.preference.trainer import beta_of_step


def test_schedules_lead_from_the_first_step_to_the_last():
    def betas(*steps: int, **config: object) -> list[float]:
        return [beta_of_step(0.1, BetaConfig(**config), step, 5) for step in steps]

    assert betas(*range(5), schedule="linear", final=0.5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    early = 0.1 + 0.4 * 0.5 * (1 - math.cos(math.pi / 4))
    assert betas(0, 1, 2, 4, 9, schedule="cosine", final=0.5) == pytest.approx([0.1, early, 0.3, 0.5, 0.5])
    assert betas(0, 4) == [0.1, 0.1]


@pytest.mark.parametrize(("key", "value"), [("schedule", "linear"), ("final", 0.3)])
def test_a_contradictory_section_is_refused(key: str, value: object):
    with pytest.raises(ValidationError, match=f"{key} = {value!r}"):
        BetaConfig(**{key: value})
