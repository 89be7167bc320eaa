"""Warn during a run of reward hacking, collapse, divergence and drift, with what to try.

An alert is raised once, when its figure crosses its threshold, and again only after the figure has recovered.
Figures are means over the last `window` steps, so that one odd step raises nothing. Evaluations, a step's
difference from the rollout engine, and a loss that is not finite count at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from statistics import median_high, median_low
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter

from grpo_fast.config.record import AlertsConfig


@dataclass(frozen=True)
class Alert:
    """One line of `alerts.jsonl`."""

    step: int
    alert: str  # its threshold's key in the configuration
    state: str  # "raised" or "cleared"
    value: float
    threshold: float
    text: str  # what was measured and what to try


class AlertRule(BaseModel):
    """An alert is raised while its figure is on the wrong side of its threshold."""

    metric: str
    healthy: float | None = None
    seen: str
    remedy: str


_TABLE = files("grpo_fast.record").joinpath("alerts.yaml").read_text(encoding="utf-8")
RULES = TypeAdapter(dict[str, AlertRule]).validate_python(yaml.safe_load(_TABLE))
"""By the threshold's key in the configuration; alerts.yaml explains the fields."""


class AlertState(BaseModel):
    """The past metrics of one stage."""

    stage: float | None = None
    recent: dict[str, list[float]] = {}  # the last `window` values of each metric
    first_length: float | None = None  # mean over the first window
    score: float | None = None  # the latest held-out score
    score_high: float = 0.0  # the upper end of its interval
    best_score: float | None = None
    reward_at_best: float | None = None
    loss_is_finite: bool = True  # of the latest step
    raised: list[str] = []


class AlertMonitor:
    """Follows a run's metrics; its state resumes exactly."""

    def __init__(self, config: AlertsConfig) -> None:
        self.config = config
        self._state = AlertState()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Return the alerts that this step raises or clears."""
        if metrics.get("stage") != self._state.stage:  # with other rewards and lengths
            self._state = AlertState(stage=metrics.get("stage"))
        self._take(metrics)
        alerts, raised = [], self._state.raised
        for name, rule in RULES.items():
            threshold: float | None = getattr(self.config, name)
            value = self._figure(name)
            if threshold is None or value is None:
                continue
            healthy = 2 * threshold if rule.healthy is None else rule.healthy
            # Once raised, the figure must recover part of the way from the threshold to healthy.
            limit = threshold + (self.config.clear_margin * (healthy - threshold) if name in raised else 0.0)
            is_wrong = value > limit if healthy <= threshold else value < limit
            if is_wrong == (name in raised):
                continue
            if is_wrong:
                raised.append(name)
                seen = rule.seen.format(value=value, threshold=threshold)
                state, text = "raised", f"alert, {name}: {seen}\n  try: {rule.remedy}"
            else:
                raised.remove(name)
                state, text = "cleared", f"alert cleared, {name}: now {value:.3g}"
            alerts.append(Alert(step, name, state, value, threshold, text))
        return alerts

    def _take(self, metrics: Mapping[str, float]) -> None:
        """Add a step. Metrics other than the loss that are not finite count as not measured."""
        state, window = self._state, self.config.window
        state.loss_is_finite = math.isfinite(metrics.get("loss", 0.0))
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for name in ("reward/std", *(rule.metric for rule in RULES.values())):
            if name in finite:
                state.recent[name] = [*state.recent.get(name, []), finite[name]][-window:]
        if state.first_length is None:
            state.first_length = self._mean("completion/length_mean")
        score, reward = finite.get("eval/score"), self._mean("reward/mean")
        if score is not None and reward is not None:
            state.score, state.score_high = score, finite.get("eval/score_high", score)
            if state.best_score is None or score >= state.best_score:
                state.best_score, state.reward_at_best = score, reward

    def _mean(self, metric: str) -> float | None:
        """Return the mean over the window, or None until the window is full."""
        values, window = self._state.recent.get(metric, []), self.config.window
        return sum(values) / window if len(values) == window else None

    def _figure(self, name: str) -> float | None:
        """Return the value that is compared with the threshold, or None where there is none yet."""
        state, metric = self._state, RULES[name].metric
        recent, mean = state.recent.get(metric, []), self._mean(metric)
        if name in ("evaluation_truncated", "sampler_drift"):  # means already, not of every step
            return recent[-1] if recent else None
        if name == "divergence" and not state.loss_is_finite:
            return math.inf
        if mean is None:
            return None
        if name == "length_reward_correlation":
            return abs(mean)
        if name == "divergence":
            half = len(recent) // 2
            older, newer = median_high(recent[:half] or recent), median_low(recent[half:])
            return newer / older if older else None
        if name == "stale_rewards":  # the spread between the window's steps, and within their groups
            within = self._mean("reward/std")
            return None if within is None else max(recent) - min(recent) + within
        if name == "reward_rise":  # since the best held-out score, if the score has fallen since; else 0
            if state.score is None or state.best_score is None or state.reward_at_best is None:
                return None
            fell = state.best_score - state.score >= self.config.held_out_drop
            fell = fell and state.score_high < state.best_score
            return mean - state.reward_at_best if fell else 0.0
        if name == "length_drift":  # the factor between the mean length and its start, up or down
            first = state.first_length
            return max(mean / first, first / mean) if mean and first else None
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return self._state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; a longer window has to fill up first."""
        self._state = AlertState.model_validate(state)
