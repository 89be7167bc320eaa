"""What a person sees while a run goes on: a live panel on a terminal, else one line a step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_fast.run_record.summary import Interval, bytes_text, duration_text, score_text

WIDTH = 96  # columns; wider panels are harder to read
SIDE_BY_SIDE = 84  # columns from which the metrics stand in three groups
HISTORY = 60  # rewards in the sparkline
RECENT = 20  # steps that the remaining time is judged by
BARS = "▁▂▃▄▅▆▇█"

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Field:
    """One number of the panel, and its key in a plain line."""

    label: str
    key: str
    name: str  # of the metric or timing
    style: str  # of format(), or `percent`, `duration`, `bytes`


LEARNING = (
    Field("flat groups", "flat", "groups/flat", "percent"),
    Field("preferred", "preferred", "rewards/accuracies", "percent"),
    Field("reward gap", "gap", "rewards/margins", ".3g"),
    Field("ranked right", "ranked", "ranking/pairwise_accuracy", "percent"),
    Field("loss", "loss", "loss", ".4g"),
    Field("gradient norm", "grad_norm", "grad_norm", ".3g"),
    Field("learning rate", "lr", "learning_rate", ".3g"),
)
POLICY = (
    Field("beta", "beta", "beta", ".3g"),
    Field("KL", "kl", "kl", ".3g"),
    Field("clip fraction", "clip", "clip_ratio/region_mean", "percent"),
    Field("entropy", "entropy", "entropy", ".3g"),
    Field("sampler difference", "sampler_diff", "sampling/logp_difference_mean", ".2g"),
    Field("length", "length", "completion/length_mean", ".1f"),
    Field("truncated", "truncated", "completion/truncated", "percent"),
)
SPEED = (
    Field("tokens/s", "tok/s", "tokens_per_second", ",.0f"),
    Field("memory", "mem", "memory/peak_bytes", "bytes"),
    Field("a step", "t_step", "time/step", "duration"),
)
PHASES = tuple(
    Field(phase, f"t_{phase}", f"time/{phase}", "duration")
    for phase in ("generate", "reward", "logprobs", "update", "exchange", "eval")
)


@dataclass(frozen=True)
class Rollout:
    """A generation that goes on."""

    tokens: int  # decoded
    finished: int  # completions that have ended
    total: int
    started: float  # time.monotonic()

    def text(self, now: float) -> str:
        """How far it is, how fast, and how long it takes if completions go on ending as they did."""
        seconds = now - self.started
        words = [f"{self.finished} of {self.total} completions"]
        if seconds > 0:
            words.append(f"{self.tokens / seconds:,.0f} tokens/s")
        if self.finished:
            left = seconds * (self.total - self.finished) / self.finished
            words.append(f"{duration_text(left)} left")
        return " · ".join(words)


@dataclass(frozen=True)
class State:
    """Everything the panel shows. Replaced as a whole, for the panel is drawn from another thread."""

    step: int
    metrics: Numbers
    timings: Numbers
    rewards: tuple[float, ...] = ()
    evaluations: tuple[str, ...] = ()  # the first and the latest
    remaining: float | None = None  # seconds
    updated: float = 0.0  # time.monotonic() of the last news
    rollout: Rollout | None = None  # None: nothing is being generated


class Display:
    """Progress of a run, as a context manager. Metrics that a run has not are left out.

    Args:
        total_steps: optimiser steps of the whole run.
        console: where to write; None: standard output.
        start_step: steps that an earlier process of a resumed run has done.
    """

    def __init__(self, total_steps: int, *, console: Console | None = None, start_step: int = 0) -> None:
        self._console = console or Console()
        self._total = total_steps
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._state = State(step=start_step, metrics={}, timings={}, updated=time.monotonic())
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if _can_draw(self._console):
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Numbers, timings: Numbers) -> None:
        """Show a finished step; the first one is step 1."""
        if "time/step" in timings:
            self._durations.append(timings["time/step"])
        reward = metrics.get("reward/mean")
        self._state = replace(
            self._state,
            step=step,
            metrics=metrics,
            timings=timings,
            rewards=(*self._state.rewards, *([] if reward is None else [reward]))[-HISTORY:],
            remaining=self._remaining(step),
            updated=time.monotonic(),
            rollout=None,
        )
        if self._live is None:
            self._print(plain_line(self._state, self._total))
        else:
            self._live.refresh()

    def evaluation(self, step: int, score: float, interval: Interval | None, n: int) -> None:
        """Show a held-out score: `interval` is (low, high), `n` counts questions."""
        text = f"{score_text(score, interval)} of {n} at step {step}"
        state = self._state
        evaluations = (*state.evaluations[:1], text)
        self._state = replace(state, evaluations=evaluations, updated=time.monotonic(), rollout=None)
        if self._live is None:
            bounds = "" if interval is None else f" low={interval[0]:.4g} high={interval[1]:.4g}"
            self._print(f"evaluation step={step}/{self._total} score={score:.4g}{bounds} n={n}")
        else:
            self._live.refresh()

    def rollout(self, tokens: int, finished: int, total: int) -> None:
        """Show how a generation goes; only on a terminal. Fewer tokens than before begin another one.

        Args:
            tokens: decoded so far.
            finished: completions that have ended, of `total`.
        """
        before, now = self._state.rollout, time.monotonic()
        begins = before is None or tokens < before.tokens
        rollout = Rollout(tokens, finished, total, now if begins else before.started)
        self._state = replace(self._state, rollout=None if finished == total else rollout)

    def message(self, text: str) -> None:
        """Print a line; on a terminal, above the panel."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _remaining(self, step: int) -> float | None:
        if not self._durations:
            return None
        return (self._total - step) * sum(self._durations) / len(self._durations)

    def _panel(self) -> Panel:
        state = self._state
        body = [_progress(state, self._total), Text()]
        body += [_headline(state), Text(), _metrics(state.metrics, self._console.width)]
        if state.timings or state.rollout:
            body += [Text(), _speed(state)]
        return Panel(
            Group(*body),
            title="grpo_fast",
            border_style="dim",
            width=min(WIDTH, self._console.width),
            padding=(0, 1),
        )


def plain_line(state: State, total: int) -> str:
    """A step as `key=value` words in ASCII; a metric has the same key in every line."""
    words = [f"step={state.step}/{total}"]
    words += [
        f"{key}={state.metrics[name]:.4g}"
        for key, name in (("reward", "reward/mean"), ("reward_std", "reward/std"), ("eval", "eval/score"))
        if name in state.metrics
    ]
    fields = [(state.metrics, POLICY + LEARNING), (state.timings, SPEED + PHASES)]
    words += [
        f"{field.key}={_format(field, numbers[field.name]).replace(' ', '')}"
        for numbers, group in fields
        for field in group
        if field.name in numbers
    ]
    if state.remaining is not None:
        words.append(f"eta={duration_text(state.remaining)}")
    return " ".join(words)


def sparkline(values: Sequence[float]) -> str:
    """Values as block characters from their smallest to their largest; a gap where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    level = (len(BARS) - 1) / span if span else 0.0
    return "".join(BARS[round((value - low) * level)] if math.isfinite(value) else " " for value in values)


def _progress(state: State, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(
        Text(f"step {state.step}/{total}", style="bold"),
        ProgressBar(total=total, completed=state.step),
        _clock(state, total),
    )
    return row


def _clock(state: State, total: int) -> Text:
    if state.step >= total:
        return Text("done", style="bold")
    left = "" if state.remaining is None else f"{duration_text(state.remaining)} left"
    return Text.assemble((left, "bold"), (f"  {int(time.monotonic() - state.updated)}s into the step", "dim"))


def _headline(state: State) -> RenderableType:
    rows = _pairs()
    if state.rewards:
        spread = state.metrics.get("reward/std")
        value = f"{state.rewards[-1]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
        rows.add_row(
            "reward", Text(f"{value}  ", style="bold") + Text(sparkline(state.rewards), style="green")
        )
    parts = [(name.split("/")[1], value) for name, value in state.metrics.items() if _is_part(name)]
    if len(parts) > 1:
        rows.add_row("of which", " · ".join(f"{name} {value:.3f}" for name, value in parts))
    if state.evaluations:
        rows.add_row("held-out", Text(" → ".join(state.evaluations), style="bold"))
    if not rows.row_count:
        rows.add_row("waiting for the first step", "")
    return rows


def _is_part(name: str) -> bool:
    """Whether a metric is one reward function's mean: `reward/<name>/mean`."""
    return name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2


def _metrics(metrics: Numbers, width: int) -> RenderableType:
    if width < SIDE_BY_SIDE:
        return _fields(LEARNING + POLICY, metrics)
    row = Table.grid(padding=(0, 4))
    row.add_row(*(_fields(group, metrics) for group in (LEARNING, POLICY[:3], POLICY[3:])))
    return row


def _speed(state: State) -> RenderableType:
    rows, timings = _pairs(), state.timings
    if state.rollout is not None:
        rows.add_row("generating", state.rollout.text(time.monotonic()))
    if not timings:
        return rows
    words = [f"{_format(f, timings[f.name])} {f.label}" for f in SPEED if f.name in timings]
    rows.add_row("speed", " · ".join(words))
    phases = [f"{f.label} {_format(f, timings[f.name])}" for f in PHASES if f.name in timings]
    if phases:
        rows.add_row("phases", " · ".join(phases))
    return rows


def _fields(fields: Sequence[Field], numbers: Numbers) -> Table:
    rows = _pairs()
    for field in fields:
        if field.name in numbers:
            rows.add_row(field.label, _format(field, numbers[field.name]))
    return rows


def _pairs() -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    return rows


def _format(field: Field, value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if field.style == "percent":
        return f"{100 * value:.1f} %"
    if field.style == "duration":
        return duration_text(value)
    if field.style == "bytes":
        return bytes_text(value)
    return format(value, field.style)


def _can_draw(console: Console) -> bool:
    """A terminal that moves its cursor and knows the block characters."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
