"""Alerts of a run that goes wrong: raised once, cleared once, with what to try."""

from __future__ import annotations

import json
import math

import pytest

from grpo_fast.record.alerts import RULES, Alert, AlertMonitor, AlertsConfig

HEALTHY = {
    **{"reward/mean": 0.5, "reward/std": 0.3, "groups/flat": 0.2, "groups/unique_completions": 0.9},
    **{"completion/truncated": 0.1, "completion/length_mean": 100.0, "grad_norm": 2.0, "loss": 0.01},
    **{"completion/length_reward_correlation": 0.1, "entropy": 0.5, "kl": 0.01},
    **{"sampling/logp_difference_mean": 0.02, "sampling/importance_ratio_mean": 0.98},
}
DIVERGED = "divergence"


def run(monitor: AlertMonitor, *stretches: tuple[int, dict[str, float]], start: int = 0) -> list[Alert]:
    """So many steps with healthy metrics but for the given ones; all alerts."""
    alerts: list[Alert] = []
    step = start
    for steps, changes in stretches:
        for _ in range(steps):
            step += 1
            alerts += monitor.update(step, HEALTHY | changes)
    return alerts


@pytest.fixture
def monitor() -> AlertMonitor:
    return AlertMonitor(AlertsConfig(window=4))


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("flat_groups", {"groups/flat": 0.95}),
        ("unique_completions", {"groups/unique_completions": 0.05}),
        ("entropy", {"entropy": 0.001}),
        ("kl", {"kl": 3.0}),
        ("length_drift", {"completion/length_mean": 250.0}),
        ("length_drift", {"completion/length_mean": 10.0}),
        ("correction_weight", {"sampling/importance_ratio_mean": 0.1}),
        ("truncated", {"completion/truncated": 0.9}),
        ("stale_rewards", {"reward/std": 0.0, "reward/mean": 1.0}),
        ("length_reward_correlation", {"completion/length_reward_correlation": 0.95}),
        ("length_reward_correlation", {"completion/length_reward_correlation": -0.95}),
    ],
)
def test_each_alert_is_raised_once_with_what_to_try_and_cleared_once(monitor, name, metrics):
    alerts = run(monitor, (10, {}), (40, metrics), (40, {}))
    assert [(alert.alert, alert.state) for alert in alerts] == [(name, "raised"), (name, "cleared")]
    assert 10 < alerts[0].step <= 14 and 50 < alerts[1].step <= 54
    assert RULES[name].remedy in alerts[0].text and "try:" not in alerts[1].text


@pytest.mark.parametrize(
    "stretches",
    [
        [(50, {"eval/score": 0.4})],  # healthy
        [(10, {}), (1, {"kl": 1.5, "groups/flat": 1.0}), (10, {})],  # one odd step
        [(10, {"reward/mean": 0.6, "eval/score": 0.6}), (20, {"reward/mean": 0.3, "eval/score": 0.2})],
        [(10, {"eval/score": 0.6}), (20, {"reward/mean": 0.9, "eval/score": 0.58})],  # a small fall
        [(1, {"kl": float("nan")})],
        [(10, {}), (1, {"grad_norm": 500.0}), (10, {})],  # one large gradient
        [(4, {"grad_norm": 2.0 * 1.3**i}) for i in range(9)],  # gradients that grow slowly
        [(1, {"reward/std": 0.0, "reward/mean": i % 2}) for i in range(20)],  # flat groups, other rewards
        [(1, {"eval/truncated": 0.1}), (10, {})],
    ],
)
def test_what_is_no_alarm_raises_nothing(monitor, stretches):
    assert run(monitor, *stretches) == []


def test_a_difference_from_the_sampler_is_judged_by_its_own_step(monitor):
    for value, state in ((0.4, "raised"), (0.02, "cleared")):
        (alert,) = monitor.update(1, {"sampling/logp_difference_mean": value})
        assert (alert.alert, alert.state, alert.value) == ("sampler_drift", state, value)
        assert not any(monitor.update(step, {"loss": 0.0}) for step in range(2, 12))


def test_gradients_that_explode_and_a_loss_that_is_not_finite_are_divergence(monitor):
    alerts = run(monitor, (10, {}), *[(1, {"grad_norm": 2.0 * 20.0**i}) for i in range(8)], (10, {}))
    assert [(alert.alert, alert.state) for alert in alerts] == [(DIVERGED, "raised"), (DIVERGED, "cleared")]
    assert alerts[0].step <= 14
    for loss in (math.nan, math.inf):  # at once
        (alert,) = run(AlertMonitor(AlertsConfig(window=4)), (1, {"loss": loss}))
        assert (alert.alert, alert.state, alert.value) == (DIVERGED, "raised", math.inf)


def test_truncated_answers_raise_an_alert_until_a_better_evaluation(monitor):
    alerts = monitor.update(0, {"eval/truncated": 1.0})
    alerts += run(monitor, (10, {}), (1, {"eval/truncated": 0.9}), (1, {"eval/truncated": 0.1}))
    assert [(a.step, a.alert, a.state) for a in alerts] == [
        (0, "evaluation_truncated", "raised"),
        (12, "evaluation_truncated", "cleared"),
    ]


def test_every_threshold_has_its_rule():
    assert RULES.keys() == AlertsConfig.model_fields.keys() - {"window", "clear_margin", "held_out_drop"}


def test_an_alert_without_threshold_is_off():
    assert run(AlertMonitor(AlertsConfig(window=2, kl=None)), (10, {"kl": 100.0})) == []


def test_a_figure_that_trembles_around_its_threshold_is_told_of_once(monitor, dice):
    steps = [(1, {"kl": 0.5 + dice.uniform(-0.04, 0.05)}) for _ in range(300)]
    (alert,) = run(monitor, (4, {"kl": 0.6}), *steps)
    assert (alert.step, alert.alert, alert.state) == (4, "kl", "raised")


def test_reward_that_rises_while_the_held_out_score_falls_is_reward_hacking(monitor):
    climbing = [(5, {"reward/mean": 0.5 + 0.02 * i, "eval/score": 0.6}) for i in range(3)]
    unsure = (10, {"reward/mean": 0.8, "eval/score": 0.5, "eval/score_high": 0.61})
    falling = (10, {"reward/mean": 0.8, "eval/score": 0.5})
    recovered = (10, {"reward/mean": 0.8, "eval/score": 0.62})
    assert run(monitor, *climbing, unsure) == []
    alerts = run(monitor, falling, recovered, start=25)
    assert [(a.alert, a.state) for a in alerts] == [("reward_rise", "raised"), ("reward_rise", "cleared")]


def test_a_new_stage_begins_with_a_clean_sheet(monitor):
    first = run(monitor, (10, {"stage": 0}), (10, {"stage": 0, "completion/length_mean": 300.0}))
    second = run(monitor, (10, {"stage": 1, "completion/length_mean": 300.0}), start=20)
    assert [alert.state for alert in first] == ["raised"] and second == []


def test_a_resumed_monitor_goes_on_exactly(dice):
    steps = [
        {name: value * dice.uniform(0, 3) for name, value in HEALTHY.items()} | {"eval/score": dice.random()}
        for _ in range(60)
    ]
    config = AlertsConfig(window=3)
    original = AlertMonitor(config)
    for step, metrics in enumerate(steps[:30]):
        original.update(step, metrics)
    resumed = AlertMonitor(config)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for step, metrics in enumerate(steps[30:], start=30):
        assert resumed.update(step, metrics) == original.update(step, metrics)
    assert resumed.state_dict() == original.state_dict()
