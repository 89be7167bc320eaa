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
    """When to warn. A threshold is compared with a mean over `window` steps; none switches its alert off."""

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
    """News of one sign: it appeared, or went away."""

    step: int
    alert: str  # name of the sign: its threshold's key in the configuration
    state: str  # "raised" or "cleared"
    value: float
    threshold: float
    text: str  # what was seen and what to try, for a person

    def record(self) -> dict[str, Any]:
        """A line of `alerts.jsonl`."""
        return dict(vars(self))


@dataclass(frozen=True)
class Sign:
    """Something to watch for. It is there when its figure is on the wrong side of the threshold."""

    name: str
    threshold: float
    neutral: float  # where the figure of a healthy run lies; says which side is wrong, too
    figure: Callable[[Watch], float | None]  # None: not known yet, or not measured
    seen: str  # str.format over `value` and `threshold`
    remedy: str

    def present(self, value: float, raised: bool, margin: float) -> bool:
        """Whether the sign is there; once raised it must come back by `margin` of the way to neutral."""
        limit = self.threshold + (margin * (self.neutral - self.threshold) if raised else 0.0)
        return value > limit if self.neutral <= self.threshold else value < limit

    def news(self, step: int, value: float, raised: bool) -> Alert:
        if not raised:
            text = f"alert cleared, {self.name}: now {value:.3g}"
            return Alert(step, self.name, "cleared", value, self.threshold, text)
        seen = self.seen.format(value=value, threshold=self.threshold)
        text = f"alert, {self.name}: {seen}; try: {self.remedy}"
        return Alert(step, self.name, "raised", value, self.threshold, text)


class Watch:
    """What the signs are judged by: means of recent metrics, and a few figures of the past."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.stage: float | None = None
        self.recent: dict[str, deque[float]] = {}
        self.first_length: float | None = None
        self.score: float | None = None  # the latest held-out score
        self.best_score: float | None = None
        self.reward_at_best: float | None = None

    def take(self, metrics: Mapping[str, float]) -> None:
        for name in WATCHED:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self.recent.setdefault(name, deque(maxlen=self.window)).append(float(value))
        if self.first_length is None:
            self.first_length = self.mean("completion/length_mean")
        score = metrics.get("eval/score")
        if score is not None and math.isfinite(score):
            self._take_score(float(score))

    def mean(self, name: str) -> float | None:
        """Over the window; None until it is full."""
        values = self.recent.get(name, ())
        return sum(values) / self.window if len(values) == self.window else None

    def state_dict(self) -> dict[str, Any]:
        return vars(self) | {"recent": {name: list(values) for name, values in self.recent.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.recent = {name: deque(values, self.window) for name, values in state["recent"].items()}

    def _take_score(self, score: float) -> None:
        reward = self.mean("reward/mean")
        if reward is None:  # the rewards of so few steps say nothing yet
            return
        self.score = score
        if self.best_score is None or score >= self.best_score:
            self.best_score, self.reward_at_best = score, reward


WATCHED = (
    "reward/mean",
    "groups/flat",
    "groups/unique_completions",
    "completion/length_mean",
    "completion/length_reward_correlation",
    "entropy",
    "kl",
)


class AlertMonitor:
    """Follows a run's metrics; exact after a resume."""

    def __init__(self, config: AlertsConfig) -> None:
        self.margin = config.clear_margin
        self.signs = tuple(sign for sign in _signs(config) if sign.threshold is not None)
        self.window = config.window
        self.watch = Watch(config.window)
        self.raised: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Signs that appeared or went away with this step."""
        stage = metrics.get("stage")
        if (
            stage != self.watch.stage
        ):  # a new stage has other rewards and lengths: the past says nothing about it
            self.watch, self.raised = Watch(self.window), set()
            self.watch.stage = stage
        self.watch.take(metrics)
        return list(self._changes(step))

    def _changes(self, step: int) -> Iterator[Alert]:
        for sign in self.signs:
            value, was_raised = sign.figure(self.watch), sign.name in self.raised
            if value is None or sign.present(value, was_raised, self.margin) == was_raised:
                continue
            self.raised ^= {sign.name}
            yield sign.news(step, value, raised=not was_raised)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"watch": self.watch.state_dict(), "raised": sorted(self.raised)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError when the state was saved with another window."""
        if state["watch"]["window"] != self.window:
            raise ValueError(
                f"the saved alerts average over {state['watch']['window']} steps and alerts.window is "
                f"{self.window}: keep the window of the run"
            )
        self.watch.load_state_dict(state["watch"])
        self.raised = set(state["raised"])


def _signs(config: AlertsConfig) -> tuple[Sign, ...]:
    return (
        Sign(
            "reward_rise",
            config.reward_rise,
            0.0,
            lambda watch: _hacking(watch, config.held_out_drop),
            "the training reward rose by {value:.3g} (alert above {threshold:g}) while the held-out score "
            "fell: a sign of reward hacking",
            "read samples.jsonl for answers that please the reward and are wrong, tighten that reward, raise "
            "loss.beta, or go back to the checkpoint before the fall",
        ),
        Sign(
            "length_reward_correlation",
            config.length_reward_correlation,
            0.0,
            lambda watch: _absolute(watch.mean("completion/length_reward_correlation")),
            "length and reward within groups correlate by {value:.2f} in size (alert above {threshold:g}): "
            "length may be what is rewarded",
            "see whether right answers must have that length; if not, add a length reward against it, or use "
            "loss.loss_type: dr_grpo, whose loss does not favour a length",
        ),
        Sign(
            "length_drift",
            config.length_drift,
            1.0,
            _drift,
            "the mean completion length is {value:.3g} times away from its start (alert above {threshold:g})",
            "growing: a length reward or a smaller rollout.max_completion_length; shrinking: check that the "
            "reward does not favour empty answers; either way loss.loss_type: dr_grpo or dapo",
        ),
        Sign(
            "unique_completions",
            config.unique_completions,
            1.0,
            lambda watch: watch.mean("groups/unique_completions"),
            "only a share {value:.2f} of a group's completions differ (alert below {threshold:g}): mode "
            "collapse",
            "raise rollout.temperature or loss.entropy_coef, lower optimizer.learning_rate, raise "
            "loss.epsilon_high, or train on harder prompts (curriculum)",
        ),
        Sign(
            "entropy",
            config.entropy,
            math.inf if config.entropy is None else 2 * config.entropy,
            lambda watch: watch.mean("entropy"),
            "the entropy fell to {value:.3g} nats a token (alert below {threshold:g}): mode collapse",
            "raise loss.entropy_coef or use loss.use_adaptive_entropy, raise loss.epsilon_high, lower "
            "optimizer.learning_rate",
        ),
        Sign(
            "kl",
            config.kl,
            0.0,
            lambda watch: watch.mean("kl"),
            "the KL to the reference is {value:.3g} nats a token (alert above {threshold:g})",
            "raise loss.beta, lower optimizer.learning_rate or num_iterations, lower optimizer.max_grad_norm",
        ),
        Sign(
            "flat_groups",
            config.flat_groups,
            0.0,
            lambda watch: watch.mean("groups/flat"),
            "a share {value:.2f} of the groups has no spread (alert above {threshold:g}): there is little to "
            "learn from",
            "prompts of medium difficulty (curriculum), advantage.dynamic_sampling, a larger "
            "rollout.num_generations or temperature, or a reward with finer steps",
        ),
    )


def _hacking(watch: Watch, drop: float) -> float | None:
    """Reward gained since the best held-out score, where the score has fallen by `drop` since; else 0."""
    reward = watch.mean("reward/mean")
    if watch.score is None or watch.best_score is None or watch.reward_at_best is None or reward is None:
        return None
    return reward - watch.reward_at_best if watch.best_score - watch.score >= drop else 0.0


def _drift(watch: Watch) -> float | None:
    now = watch.mean("completion/length_mean")
    if now is None or not now or not watch.first_length:
        return None
    return max(now / watch.first_length, watch.first_length / now)


def _absolute(value: float | None) -> float | None:
    return None if value is None else abs(value)
