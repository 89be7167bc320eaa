"""Schedules of beta, and how it follows the reward gap."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from grpo_fast.config.preference import BetaConfig
from grpo_fast.preference.trainer import BetaController


def controller(**config: object) -> BetaController:
    return BetaController(0.1, BetaConfig(**config), total_steps=5)


def test_schedules_lead_from_the_first_step_to_the_last():
    linear, cosine = (controller(schedule=name, final=0.5) for name in ("linear", "cosine"))
    assert [linear.value(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert [cosine.value(step) for step in (0, 2, 4, 9)] == pytest.approx([0.1, 0.3, 0.5, 0.5])
    assert cosine.value(1) == pytest.approx(0.1 + 0.4 * 0.5 * (1 - math.cos(math.pi / 4)))
    assert [controller().value(step) for step in (0, 4)] == [0.1, 0.1]


def test_beta_moves_by_a_share_while_the_reward_gap_is_outside_its_band():
    settings = {"band": {"below": 0.1, "above": 0.5, "step": 0.1}, "min": 0.09, "max": 0.12}
    beta = controller(**settings)
    expected = 0.1
    for gap, factor in ((0.05, 1.1), (0.1, 1), (0.3, 1), (0.09, 1.1), (0.6, 0.9), (0.7, 0.9), (0.51, 0.9)):
        beta.observe(gap)
        expected = min(0.12, max(0.09, expected * factor))
        assert beta.value(1) == pytest.approx(expected)
    assert beta.value(1) == pytest.approx(0.09)
    resumed = controller(**settings)
    resumed.load_state_dict(beta.state_dict())
    assert resumed.value(1) == beta.value(1)


BAND = {"below": 0.1, "above": 0.5}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"schedule": "linear"}, "schedule = 'linear'"),
        ({"final": 0.3}, "final = 0.3"),
        ({"min": 0.5, "max": 0.1}, "min = 0.5"),
        ({"band": BAND}, "needs bounds of beta; set min and max"),
        ({"band": BAND, "min": 0.01, "max": 1.0, "schedule": "linear", "final": 0.3}, "keep one"),
        ({"band": {"below": 0.5, "above": 0.1}, "min": 0.01, "max": 1.0}, "below = 0.5 exceeds"),
        ({"band": BAND | {"step": 1.0}, "min": 0.01, "max": 1.0}, "step"),
    ],
)
def test_a_contradictory_section_is_refused(config, named):
    with pytest.raises(ValidationError, match=named):
        BetaConfig(**config)
