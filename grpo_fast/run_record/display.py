"""What a person sees while a run goes on: a live panel on a terminal, else one line a step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_fast.run_record.summary import PHASES, Interval, bytes_text, duration_text, score_text

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

    def text(self, numbers: Numbers) -> str:
        value = numbers[self.name]
        if not math.isfinite(value):
            return str(value)
        if self.style == "percent":
            return f"{100 * value:.1f} %"
        special = {"duration": duration_text, "bytes": bytes_text}.get(self.style)
        return special(value) if special else format(value, self.style)


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
SECONDS = tuple(Field(phase, f"t_{phase}", f"time/{phase}", "duration") for phase in PHASES)


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
    """Everything that is shown. Replaced as a whole, for the panel is drawn from another thread."""

    step: int
    total: int  # steps of the whole run
    metrics: Numbers
    timings: Numbers
    rewards: tuple[float, ...] = ()
    evaluations: tuple[str, ...] = ()  # the first and the latest
    remaining: float | None = None  # seconds
    updated: float = 0.0  # time.monotonic() of the last update
    rollout: Rollout | None = None  # None while nothing is generated


class Display:
    """Progress of a run, as a context manager. Metrics that a run has not are left out.

    Args:
        total_steps: optimiser steps of the whole run.
        console: where to write; by default standard output.
        start_step: steps that an earlier process of a resumed run has done.
    """

    def __init__(self, total_steps: int, *, console: Console | None = None, start_step: int = 0) -> None:
        self._console = console or Console()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._state = State(start_step, total_steps, {}, {}, updated=time.monotonic())
        self._live: Live | None = None

    def __enter__(self) -> Display:
        console = self._console
        draws = console.is_terminal and not console.is_dumb_terminal
        if draws and console.encoding.startswith("utf"):  # for the block characters
            self._live = Live(console=console, get_renderable=self.panel, refresh_per_second=2)
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
        mean = sum(self._durations) / len(self._durations) if self._durations else None
        reward = metrics.get("reward/mean")
        self._state = replace(
            self._state,
            step=step,
            metrics=metrics,
            timings=timings,
            rewards=(*self._state.rewards, *([] if reward is None else [reward]))[-HISTORY:],
            remaining=None if mean is None else (self._state.total - step) * mean,
            updated=time.monotonic(),
            rollout=None,
        )
        self._show(plain_line(self._state))

    def evaluation(self, step: int, score: float, interval: Interval | None, n: int) -> None:
        """Show a held-out score: `interval` is (low, high), `n` counts questions."""
        text = f"{score_text(score, interval)} of {n} at step {step}"
        evaluations = (*self._state.evaluations[:1], text)
        self._state = replace(self._state, evaluations=evaluations, updated=time.monotonic(), rollout=None)
        bounds = "" if interval is None else f" low={interval[0]:.4g} high={interval[1]:.4g}"
        self._show(f"evaluation step={step}/{self._state.total} score={score:.4g}{bounds} n={n}")

    def rollout(self, tokens: int, finished: int, total: int) -> None:
        """Show how a generation goes; only on a terminal. Fewer tokens than before begin another one.

        Args:
            tokens: decoded so far.
            finished: completions that have ended, of `total`.
        """
        before = self._state.rollout
        started = time.monotonic() if before is None or tokens < before.tokens else before.started
        rollout = Rollout(tokens, finished, total, started)
        self._state = replace(self._state, rollout=None if finished == total else rollout)

    def message(self, text: str) -> None:
        """Print a line; on a terminal, above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def panel(self) -> Panel:
        """What a terminal shows now."""
        state = self._state
        body = [_progress(state), Text(), _headline(state), Text()]
        body.append(_metrics(state.metrics, self._console.width))
        if state.timings or state.rollout:
            body += [Text(), _speed(state)]
        width = min(WIDTH, self._console.width)
        return Panel(Group(*body), title="grpo_fast", border_style="dim", width=width, padding=(0, 1))

    def _show(self, line: str) -> None:
        if self._live is None:
            self.message(line)
        else:
            self._live.refresh()


def plain_line(state: State) -> str:
    """A step as `key=value` words in ASCII; a metric has the same key in every line."""
    heads = (("reward", "reward/mean"), ("reward_std", "reward/std"), ("eval", "eval/score"))
    words = [f"step={state.step}/{state.total}"]
    words += [f"{key}={state.metrics[name]:.4g}" for key, name in heads if name in state.metrics]
    for numbers, fields in ((state.metrics, POLICY + LEARNING), (state.timings, SPEED + SECONDS)):
        words += [f"{f.key}={f.text(numbers).replace(' ', '')}" for f in fields if f.name in numbers]
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


def _progress(state: State) -> RenderableType:
    if state.step >= state.total:
        clock = Text("done", style="bold")
    else:
        left = "" if state.remaining is None else f"{duration_text(state.remaining)} left"
        into = f"  {int(time.monotonic() - state.updated)}s into the step"
        clock = Text.assemble((left, "bold"), (into, "dim"))
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=state.total, completed=state.step)
    row.add_row(Text(f"step {state.step}/{state.total}", style="bold"), bar, clock)
    return row


def _headline(state: State) -> RenderableType:
    rows = _pairs()
    if state.rewards:
        spread = state.metrics.get("reward/std")
        value = f"{state.rewards[-1]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
        line = Text(f"{value}  ", style="bold") + Text(sparkline(state.rewards), style="green")
        rows.add_row("reward", line)
    names = [name.split("/") for name in state.metrics if name.startswith("reward/")]
    parts = [part for _, part, *mean in names if mean == ["mean"]]  # of `reward/<function>/mean`
    if len(parts) > 1:
        rows.add_row("of which", " · ".join(f"{p} {state.metrics[f'reward/{p}/mean']:.3f}" for p in parts))
    if state.evaluations:
        rows.add_row("held-out", Text(" → ".join(state.evaluations), style="bold"))
    if not rows.row_count:
        rows.add_row("waiting for the first step", "")
    return rows


def _metrics(metrics: Numbers, width: int) -> RenderableType:
    wide = width >= SIDE_BY_SIDE
    groups = (LEARNING, POLICY[:3], POLICY[3:]) if wide else (LEARNING + POLICY,)
    row = Table.grid(padding=(0, 4))
    row.add_row(*(_pairs((f.label, f.text(metrics)) for f in group if f.name in metrics) for group in groups))
    return row


def _speed(state: State) -> RenderableType:
    rows, timings = _pairs(), state.timings
    if state.rollout is not None:
        rows.add_row("generating", state.rollout.text(time.monotonic()))
    if words := [f"{f.text(timings)} {f.label}" for f in SPEED if f.name in timings]:
        rows.add_row("speed", " · ".join(words))
    if phases := [f"{f.label} {f.text(timings)}" for f in SECONDS if f.name in timings]:
        rows.add_row("phases", " · ".join(phases))
    return rows


def _pairs(pairs: Iterable[tuple[str, str]] = ()) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    for label, text in pairs:
        rows.add_row(label, text)
    return rows
