"""What a person sees while a run goes on: a live panel on a terminal, else one line a step."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, TextIO, cast

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_fast.data.types import spoken
from grpo_fast.record.logs import SampleRecord
from grpo_fast.record.summary import FIGURES, Interval, duration_text, excerpt, reward_text, score_text

logger = logging.getLogger(__name__)

WIDTH = 96  # columns; wider panels are harder to read
LINE = 160  # characters of a plain line
SHOWN = 600  # characters of a completion, or of a turn of its prompt
TURNS = 4  # of a conversation: its last ones
HISTORY = 60  # rewards in the sparkline
RECENT = 20  # steps that the remaining time is judged by
BARS = "▁▂▃▄▅▆▇█"

Numbers = Mapping[str, float]


class Display:
    """Progress of a run, as a context manager. Metrics that a run has not are left out.

    The panel is drawn from another thread: attributes are replaced, never changed in place.

    Args:
        total_steps: optimiser steps of the whole run.
        console: where to write; by default standard output.
        start_step: steps that an earlier process of a resumed run has done.
        verbose: print every metric of a step.
    """

    def __init__(
        self, total_steps: int, *, console: Console | None = None, start_step: int = 0, verbose: bool = False
    ) -> None:
        self._console = console or Console(file=cast(TextIO, Output(sys.stdout)))
        self._verbose = verbose
        self._live: Live | Cell | None = None
        self._step, self._total = start_step, total_steps
        self._numbers: Numbers = {}  # metrics and timings of the last step
        self._rewards: list[float] = []
        self._durations: list[float] = []
        self._evaluations: list[str] = []  # the first and the latest
        self._updated = time.monotonic()
        self._generating = ""  # how far a generation is, while one goes on
        self._decoded, self._started = 0, 0.0  # its tokens, and when it began

    def __enter__(self) -> Display:
        console = self._console
        if console.is_jupyter:
            self._live = Cell(self.panel)
        elif console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
            self._live = Live(console=console, get_renderable=self.panel, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Numbers, timings: Numbers) -> None:
        """Show a finished step; the first one is step 1."""
        self._step, self._numbers = step, {**metrics, **timings}
        if "time/step" in timings:
            self._durations = [*self._durations, timings["time/step"]][-RECENT:]
        if "reward/mean" in metrics:
            self._rewards = [*self._rewards, metrics["reward/mean"]][-HISTORY:]
        self._show(self._plain_line())
        if self._verbose:
            words = " ".join(f"{name}={value:.4g}" for name, value in sorted(self._numbers.items()))
            options: Any = {"initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
            self.message(textwrap.fill(words, LINE, break_long_words=False, **options))

    def evaluation(self, step: int, score: float, interval: Interval, n: int) -> None:
        """Show a held-out score: `interval` is (low, high), `n` counts questions."""
        text = f"{score_text(score, interval)} of {n} at step {step}"
        self._evaluations = [*self._evaluations[:1], text]
        bounds = "low={:.4g} high={:.4g}".format(*interval)
        self._show(f"evaluation step={step}/{self._total} score={score:.4g} {bounds} n={n}")

    def rollout(self, tokens: int, finished: int, total: int) -> None:
        """Show how a generation goes, and how long it takes if completions go on ending as they did.

        Only on a terminal. Fewer tokens than before begin another one.

        Args:
            tokens: decoded so far.
            finished: completions that have ended, of `total`.
        """
        now = time.monotonic()
        if not self._generating or tokens < self._decoded:
            self._started = now
        self._decoded, seconds = tokens, now - self._started
        words = [f"{finished} of {total} completions"]
        if seconds > 0:
            words.append(f"{tokens / seconds:,.0f} tokens/s")
        if finished:
            words.append(f"{duration_text(seconds * (total - finished) / finished)} left")
        self._generating = " · ".join(words) if finished < total else ""
        if isinstance(self._live, Cell):
            self._live.refresh()

    def message(self, text: str) -> None:
        """Print a line; on a terminal, above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def samples(self, samples: Sequence[SampleRecord], count: int) -> None:
        """Show the first completion of each of the first `count` prompts, and what it earned."""
        firsts = {sample.group: sample for sample in reversed(samples)}
        for group in range(min(count, len(firsts))):
            self._console.print(_sample_table(firsts[group]), width=min(WIDTH, self._console.width))

    def panel(self) -> Panel:
        """What a terminal shows now."""
        numbers = self._numbers
        figures = [
            Text.assemble((f"{figure.title} ", "dim"), figure.text(numbers[figure.name]))
            for figure in FIGURES
            if figure.name in numbers
        ]
        body = Group(self._progress(), "", self._headline(), "", Columns(figures, padding=(0, 4)))
        width = min(WIDTH, self._console.width)
        return Panel(body, title="grpo_fast", border_style="dim", width=width, padding=(0, 1))

    def _show(self, line: str) -> None:
        """A step or an evaluation is done."""
        self._updated, self._generating = time.monotonic(), ""
        if self._live is None:
            self.message(line)
        else:
            self._live.refresh()

    @property
    def _remaining(self) -> str:
        """How long the steps to come take, if they are as long as the last ones."""
        if not self._durations or self._step >= self._total:
            return ""
        return duration_text((self._total - self._step) * fmean(self._durations))

    def _plain_line(self) -> str:
        """A step as `key=value` words in ASCII: the rewards, and what else is not zero, while it fits."""
        numbers = self._numbers
        line = f"step={self._step}/{self._total}" + (f" eta={self._remaining}" if self._remaining else "")
        heads = (("reward", "reward/mean"), ("reward_std", "reward/std"))
        words = [f"{word}={numbers[name]:.4g}" for word, name in heads if name in numbers]
        for figure in FIGURES:
            text = figure.text(numbers[figure.name]).replace(" ", "") if figure.name in numbers else ""
            if re.search("[1-9a]|inf", text):
                words.append(f"{figure.word}={text}")
        for word in words:
            if len(line) + 1 + len(word) > LINE:
                break
            line += f" {word}"
        return line

    def _progress(self) -> RenderableType:
        clock = Text("done", style="bold")
        if self._step < self._total:
            left = f"{self._remaining} left" if self._remaining else ""
            into = f"  {int(time.monotonic() - self._updated)}s into the step"
            clock = Text.assemble((left, "bold"), (into, "dim"))
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._total, completed=self._step)
        row.add_row(Text(f"step {self._step}/{self._total}", style="bold"), bar, clock)
        return row

    def _headline(self) -> RenderableType:
        numbers, rows = self._numbers, _rows()
        if self._rewards:
            spread = f" ± {numbers['reward/std']:.3f}" if "reward/std" in numbers else ""
            text = Text(f"{self._rewards[-1]:.3f}{spread}  ", style="bold")
            rows.add_row("reward", text + Text(sparkline(self._rewards), style="green"))
        parts = [name.split("/")[1] for name in numbers if re.fullmatch(r"reward/[^/]+/mean", name)]
        if len(parts) > 1:
            rows.add_row("of which", " · ".join(f"{p} {numbers[f'reward/{p}/mean']:.3f}" for p in parts))
        if self._evaluations:
            rows.add_row("held-out", Text(" → ".join(self._evaluations), style="bold"))
        if self._generating:
            rows.add_row("generating", self._generating)
        if not rows.row_count:
            rows.add_row("waiting for the first step", "")
        return rows


class Output:
    """Standard output, which a run goes on without where its terminal is closed or its reader gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._or_without():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._or_without():
            self._stream.flush()

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning("standard output cannot be written (%s): the run goes on without", error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also what is written by others, and at the exit
            os.close(nowhere)


class Cell:
    """The panel as the output of a notebook's cell, drawn anew in its place."""

    def __init__(self, panel: Callable[[], Panel]) -> None:
        from IPython.display import DisplayHandle

        self._panel = panel
        self._output = DisplayHandle()
        self._output.display(panel())
        self._drawn = 0.0

    def refresh(self) -> None:
        """Twice a second at most: the page may be far away."""
        if time.monotonic() - self._drawn >= 0.5:
            self.stop()

    def stop(self) -> None:
        self._output.update(self._panel())
        self._drawn = time.monotonic()


def sparkline(values: Sequence[float]) -> str:
    """Values as block characters from their smallest to their largest; a gap where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    level = (len(BARS) - 1) / span if span else 0.0
    return "".join(BARS[round((value - low) * level)] if math.isfinite(value) else " " for value in values)


def _sample_table(sample: SampleRecord) -> Table:
    """The conversation so far, or the prompt; the completion; what it earned."""
    rows, question = _rows(), sample.question
    turns = [{"role": "prompt", "content": question}] if isinstance(question, str) else question
    said = spoken(sample.messages or ()) or [("completion", sample.completion)]
    for who, what in [*spoken(turns[-TURNS:]), *said]:
        rows.add_row(who, _readable(what))
    parts = (f"{name} {reward_text(value)}" for name, value in sample.rewards.items())
    reward = f"{sample.reward:.3f} ({', '.join(parts)}), advantage {sample.advantage:+.3f}"
    cut = ", truncated" if sample.truncated else ""
    rows.add_row("reward", Text(f"{reward}, {sample.num_tokens} tokens{cut}\n"))
    return rows


def _readable(text: str) -> Text:
    """Without its middle where it is long; what a terminal would obey or not show, as an escape."""
    text = excerpt(text, SHOWN).expandtabs(4)
    shown = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return Text("".join(shown), overflow="fold")


def _rows() -> Table:
    """Of a dim label and what it stands for."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    return rows
