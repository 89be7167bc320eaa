"""Show a run's progress: a line for each step; on a terminal a short line above a progress bar."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from grpo_fast.record.summary import FIGURES, METRICS, Interval, duration_text

logger = logging.getLogger(__name__)

LINE = 160  # characters of a step's line on a terminal
RECENT = 20  # steps whose mean duration gives the remaining time

Numbers = Mapping[str, float]


class Display:
    """Progress of a run, as a context manager. Metrics that the run does not have are left out.

    Args:
        total_steps: optimizer steps of the whole run.
        console: where to write; the default is standard output.
        start_step: steps done before a resume.
        verbose: print every metric of a step.
    """

    def __init__(
        self, total_steps: int, *, console: Console | None = None, start_step: int = 0, verbose: bool = False
    ) -> None:
        self._console = console or Console(file=cast(TextIO, Output(sys.stdout)))
        self._verbose, self._total = verbose, total_steps
        self._durations: deque[float] = deque(maxlen=RECENT)
        done, rest = TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.description}")
        options: Any = {"console": self._console, "refresh_per_second": 2}
        options["disable"] = not self._console.is_terminal or self._console.is_dumb_terminal
        self._bar = Progress(done, BarColumn(), rest, **options)
        self._task = self._bar.add_task("", total=total_steps, completed=start_step)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Numbers, timings: Numbers) -> None:
        """Show a finished step; the first one is step 1."""
        if "time/step" in timings:
            self._durations.append(timings["time/step"])
        numbers, left = {**metrics, **timings}, ""
        if self._durations and step < self._total:
            left = duration_text((self._total - step) * fmean(self._durations))
        if self._verbose:
            every = (f"{name}={value:.4g}" for name, value in sorted(numbers.items()))
            self.message(" ".join([f"step={step}/{self._total}", *every]))
        else:
            self.message(step_line(step, self._total, left, numbers, whole=not self._console.is_terminal))
        self._bar.update(self._task, completed=step, description=left and f"{left} left")

    def evaluation(self, step: int, score: float, interval: Interval, n: int, criterion: str = "") -> None:
        """Show a held-out score; the arguments are those of `RunLogs.evaluation`."""
        bounds = "low={:.4g} high={:.4g}".format(*interval)
        right = f" right={criterion}" if criterion else ""
        self.message(f"evaluation step={step}/{self._total} score={score:.4g} {bounds} n={n}{right}")

    def rollout(self, tokens: int, finished: int, total: int) -> None:
        """Show on a terminal how many of `total` completions are finished, and the tokens decoded so far."""
        self._bar.update(self._task, description=f"{finished} of {total} completions, {tokens:,} tokens")

    def message(self, text: str) -> None:
        """Print a line; on a terminal, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_line(step: int, total: int, left: str, numbers: Numbers, *, whole: bool) -> str:
    """Return `key=value` words in ASCII.

    Args:
        whole: all rewards and figures under their names in metrics.jsonl. Otherwise short words for a
            terminal: rewards, then figures that are not zero, as many as fit.
    """
    words = [f"step={step}/{total}", *([f"eta={left}"] if left else [])]
    heads = {name: METRICS[name].word for name in ("reward/mean", "reward/std")}
    parts = [name for name in numbers if re.fullmatch("reward/.+/mean", name)]
    if whole:
        shown = [name for name in (*heads, *parts, *(figure.name for figure in FIGURES)) if name in numbers]
        return " ".join([*words, *(f"{name}={numbers[name]:.4g}" for name in shown)])
    heads |= {name: name.removesuffix("/mean") for name in parts} if len(parts) > 1 else {}
    words += [f"{word}={numbers[name]:.4g}" for name, word in heads.items() if name in numbers]
    for figure in FIGURES:
        text = figure.text(numbers[figure.name]).replace(" ", "") if figure.name in numbers else ""
        if re.search("[1-9a]|inf", text):
            words.append(f"{figure.word}={text}")
    while len(line := " ".join(words)) > LINE:
        words.pop()
    return line


class Output:
    """Standard output that may go away: its terminal is closed, or its reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            logger.warning("standard output cannot be written (%s): the run goes on without", error)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for other writers, and at the exit
            os.close(nowhere)
