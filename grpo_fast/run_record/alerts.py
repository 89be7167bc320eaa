"""Warnings while a run goes on: reward hacking, collapse, divergence, drift. Each says what to try.

An alert is raised once, when its figure crosses its threshold, and not again until the figure has come back.
What is measured is a mean over the last `window` steps, so one odd step raises nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from grpo_fast.section import Fraction, PositiveInt, Section

ALERTS_FILE = "alerts.jsonl"


class AlertsConfig(Section):
    """When to warn. A threshold is compared with a mean over `window` steps; null switches its alert off."""

    window: PositiveInt = Field(10, description="steps that a figure is averaged over")
    clear_margin: Fraction = Field(
        0.1, description="share of the threshold by which a figure must come back before an alert clears"
    )
    reward_rise: Annotated[float, Field(gt=0)] | None = Field(
        0.05, description="reward gained while the held-out score falls: reward hacking"
    )
    held_out_drop: Annotated[float, Field(gt=0)] = Field(
        0.03, description="fall of the held-out score below its best that counts for reward_rise"
    )
    length_reward_correlation: Annotated[float, Field(gt=0, le=1)] | None = Field(
        0.8, description="correlation of length and reward within groups, of either sign"
    )
    length_drift: Annotated[float, Field(gt=1)] | None = Field(
        2.0, description="factor by which the mean length leaves that of the first window"
    )
    unique_completions: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        0.3, description="share of distinct completions in a group, at least"
    )
    entropy: Annotated[float, Field(gt=0)] | None = Field(
        0.02, description="nats a token, at least; where measured"
    )
    kl: Annotated[float, Field(gt=0)] | None = Field(
        0.5, description="nats a token to the reference, at most"
    )
    flat_groups: Fraction | None = Field(0.9, description="share of groups without spread, at most")


@dataclass(frozen=True)
class Alert:
    """One line of `alerts.jsonl`: an alert was raised, or has cleared."""

    step: int
    alert: str  # its threshold's key in the configuration
    state: str  # "raised" or "cleared"
    value: float
    threshold: float
    text: str  # what was seen and what to try, for a person

    def record(self) -> dict[str, Any]:
        return dict(vars(self))


class MetricWindow:
    """What alerts are judged by: means over the last steps, and a few figures of the past."""

    def __init__(self, window: int, stage: float | None = None) -> None:
        self.window = window
        self.stage = stage
        self.recent: dict[str, deque[float]] = {}
        self.first_length: float | None = None
        self.score: float | None = None  # the latest held-out score
        self.best_score: float | None = None
        self.reward_at_best: float | None = None

    def take(self, metrics: Mapping[str, float]) -> None:
        """Add a step; figures that are not finite count as not measured."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for name in WATCHED & finite.keys():
            self.recent.setdefault(name, deque(maxlen=self.window)).append(finite[name])
        if self.first_length is None:
            self.first_length = self.mean("completion/length_mean")
        score, reward = finite.get("eval/score"), self.mean("reward/mean")
        if score is None or reward is None:  # the rewards of too few steps say nothing yet
            return
        self.score = score
        if self.best_score is None or score >= self.best_score:
            self.best_score, self.reward_at_best = score, reward

    def mean(self, name: str) -> float | None:
        """Over the window; None until it is full."""
        values = self.recent.get(name, ())
        return sum(values) / self.window if len(values) == self.window else None

    def size_of_correlation(self) -> float | None:
        value = self.mean("completion/length_reward_correlation")
        return None if value is None else abs(value)

    def length_drift(self) -> float | None:
        """Factor by which the mean length has left that of the first window, up or down."""
        now = self.mean("completion/length_mean")
        if not now or not self.first_length:
            return None
        return max(now / self.first_length, self.first_length / now)

    def reward_rise(self, held_out_drop: float) -> float | None:
        """Reward gained since the best held-out score, where the score has fallen since; else 0."""
        reward = self.mean("reward/mean")
        if self.score is None or self.best_score is None or self.reward_at_best is None or reward is None:
            return None
        return reward - self.reward_at_best if self.best_score - self.score >= held_out_drop else 0.0

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"recent": {name: list(values) for name, values in sorted(self.recent.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.recent = {name: deque(values, self.window) for name, values in state["recent"].items()}


@dataclass(frozen=True)
class AlertRule:
    """An alert is raised while its figure is on the wrong side of its threshold."""

    name: str  # its threshold's key in the configuration
    healthy: float | None  # a healthy run's figure; it lies on the right side; None for twice the threshold
    figure: Callable[[MetricWindow, AlertsConfig], float | None]  # None where it is not measured yet
    seen: str  # str.format over `value` and `threshold`
    remedy: str

    def is_raised(self, value: float, threshold: float, *, before: bool, margin: float) -> bool:
        """Once raised, the figure must come back by `margin` of the way from the threshold to healthy."""
        healthy = 2 * threshold if self.healthy is None else self.healthy
        limit = threshold + (margin * (healthy - threshold) if before else 0.0)
        return value > limit if healthy <= threshold else value < limit

    def to_alert(self, step: int, value: float, threshold: float, *, raised: bool) -> Alert:
        if not raised:
            text = f"alert cleared, {self.name}: now {value:.3g}"
        else:
            seen = self.seen.format(value=value, threshold=threshold)
            text = f"alert, {self.name}: {seen}; try: {self.remedy}"
        return Alert(step, self.name, "raised" if raised else "cleared", value, threshold, text)


class AlertMonitor:
    """Follows a run's metrics; exact after a resume."""

    def __init__(self, config: AlertsConfig) -> None:
        self.config = config
        self.metrics = MetricWindow(config.window)
        self.raised: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Alerts that this step raises or clears."""
        stage = metrics.get("stage")
        if stage != self.metrics.stage:  # other rewards and lengths: the past says nothing about them
            self.metrics, self.raised = MetricWindow(self.config.window, stage), set()
        self.metrics.take(metrics)
        return list(self._changes(step))

    def _changes(self, step: int) -> Iterator[Alert]:
        for rule in RULES:
            threshold: float | None = getattr(self.config, rule.name)
            value = rule.figure(self.metrics, self.config)
            if threshold is None or value is None:
                continue
            before = rule.name in self.raised
            raised = rule.is_raised(value, threshold, before=before, margin=self.config.clear_margin)
            if raised != before:
                self.raised ^= {rule.name}
                yield rule.to_alert(step, value, threshold, raised=raised)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"watch": self.metrics.state_dict(), "raised": sorted(self.raised)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the state was saved with another window."""
        if state["watch"]["window"] != self.config.window:
            raise ValueError(
                f"the saved alerts average over {state['watch']['window']} steps and alerts.window is "
                f"{self.config.window}: keep the window of the run"
            )
        self.metrics.load_state_dict(state["watch"])
        self.raised = set(state["raised"])


def _mean(name: str) -> Callable[[MetricWindow, AlertsConfig], float | None]:
    return lambda metrics, _: metrics.mean(name)


WATCHED = {
    *("reward/mean", "groups/flat", "groups/unique_completions", "completion/length_mean"),
    *("completion/length_reward_correlation", "entropy", "kl"),
}
RULES = (
    AlertRule(
        "reward_rise",
        0.0,
        lambda metrics, config: metrics.reward_rise(config.held_out_drop),
        "the training reward rose by {value:.3g} (alert above {threshold:g}) while the held-out score fell: "
        "a sign of reward hacking",
        "read samples.jsonl for answers that please the reward and are wrong, tighten that reward, raise "
        "loss.beta, or go back to the checkpoint before the fall",
    ),
    AlertRule(
        "length_reward_correlation",
        0.0,
        lambda metrics, _: metrics.size_of_correlation(),
        "length and reward within groups correlate by {value:.2f} in size (alert above {threshold:g}): "
        "length may be what is rewarded",
        "see whether right answers must have that length; if not, add a length reward against it, or use "
        "loss.loss_type: dr_grpo, whose loss does not favour a length",
    ),
    AlertRule(
        "length_drift",
        1.0,
        lambda metrics, _: metrics.length_drift(),
        "the mean completion length is {value:.3g} times away from its start (alert above {threshold:g})",
        "growing: a length reward or a smaller rollout.max_completion_length; shrinking: check that the "
        "reward does not favour empty answers; either way loss.loss_type: dr_grpo or dapo",
    ),
    AlertRule(
        "unique_completions",
        1.0,
        _mean("groups/unique_completions"),
        "only a share {value:.2f} of a group's completions differ (alert below {threshold:g}): mode collapse",
        "raise rollout.temperature or loss.entropy_coef, lower optimizer.learning_rate, raise "
        "loss.epsilon_high, or train on harder prompts (curriculum)",
    ),
    AlertRule(
        "entropy",
        None,
        _mean("entropy"),
        "the entropy fell to {value:.3g} nats a token (alert below {threshold:g}): mode collapse",
        "raise loss.entropy_coef or use loss.use_adaptive_entropy, raise loss.epsilon_high, lower "
        "optimizer.learning_rate",
    ),
    AlertRule(
        "kl",
        0.0,
        _mean("kl"),
        "the KL to the reference is {value:.3g} nats a token (alert above {threshold:g})",
        "raise loss.beta, lower optimizer.learning_rate or num_iterations, lower optimizer.max_grad_norm",
    ),
    AlertRule(
        "flat_groups",
        0.0,
        _mean("groups/flat"),
        "a share {value:.2f} of the groups has no spread (alert above {threshold:g}): there is little to "
        "learn from",
        "prompts of medium difficulty (curriculum), advantage.dynamic_sampling, a larger "
        "rollout.num_generations or temperature, or a reward with finer steps",
    ),
)
