"""What a person sees: one line for each step, a bar below the lines on a terminal, and no invented number."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from grpo_fast.record.display import Display, step_line
from grpo_fast.record.summary import FIGURES

METRICS = {
    **{"reward/mean": 0.512, "reward/std": 0.301, "reward/correct/mean": 0.4, "reward/format/mean": 0.9},
    **{"groups/flat": 0.25, "kl": 0.0012, "completion/truncated": 0.0, "learning_rate": 2e-5},
}
TIMINGS = {"time/step": 6.6, "time/reward": 0.012, "tokens_per_second": 512.3, "memory/peak_bytes": 3 * 2**29}


class Utf8Stream(io.StringIO):
    encoding = "utf-8"


def console(*, is_terminal: bool) -> Console:
    options: Any = {"color_system": None, "legacy_windows": False}
    return Console(file=Utf8Stream(), force_terminal=is_terminal, width=100, **options)


def text_of(console: Console) -> str:
    return console.file.getvalue()


def test_a_piped_step_is_one_line_with_every_reward_and_figure():
    pipe = console(is_terminal=False)

    with Display(40, console=pipe) as display:
        display.update(1, METRICS | {"policy/ratio_mean": 1.0}, TIMINGS)
        display.update(2, {"reward/mean": math.nan, "kl": math.inf}, {})
        display.evaluation(2, 0.217, (0.174, 0.267), 300, "exact_match>=1")
        display.message("saved [bold]checkpoint[/bold] 10")
        display.rollout(0, 0, 64)  # for a terminal only

    first, second, evaluation, message = text_of(pipe).splitlines()
    words = dict(word.split("=") for word in first.split())
    numbers = {name: f"{value:.4g}" for name, value in (METRICS | TIMINGS).items()}
    assert words == {"step": "1/40", "eta": "4m17s"} | numbers
    assert second == "step=2/40 eta=4m11s reward/mean=nan kl=inf"
    assert evaluation == "evaluation step=2/40 score=0.217 low=0.174 high=0.267 n=300 right=exact_match>=1"
    assert message == "saved [bold]checkpoint[/bold] 10"


def test_a_terminals_line_has_short_words_that_are_not_zero():
    everything = {figure.name: 12345678.9 for figure in FIGURES}
    first = step_line(1, 40, "4m17s", METRICS | TIMINGS, whole=False)
    full = step_line(3, 40, "", everything | METRICS, whole=False)
    words = dict(word.split("=") for word in first.split())
    told = {"step": "1/40", "eta": "4m17s", "reward": "0.512", "reward_std": "0.301", "kl": "0.0012"}
    told |= {"flat": "25.0%", "tok/s": "512", "mem": "1.5GiB", "t_step": "6.6s"}
    told |= {"reward/correct": "0.4", "reward/format": "0.9", "lr": "2e-05"}
    assert words == told and first.isascii() and 100 < len(full) <= 160


def test_a_terminal_has_a_bar_below_the_lines_and_is_left_as_it_was():
    during, after = console(is_terminal=True), console(is_terminal=True)

    with pytest.raises(RuntimeError), Display(40, console=during, start_step=12) as display:
        display.rollout(12000, 16, 64)
        raise RuntimeError
    with Display(40, console=after) as display:
        display.update(13, METRICS, TIMINGS)

    text = text_of(during)
    assert re.search("step 12/40 ━+ +16 of 64 completions, 12,000 tokens", text)
    assert "\x1b[?25h" in text.splitlines()[-1]  # the cursor is shown again
    text = text_of(after)
    assert "step=13/40 eta=2m58s reward=0.512" in text and re.search("step 13/40 ━+ +2m58s left", text)


def test_verbose_prints_every_metric_of_a_step():
    pipe, many = console(is_terminal=False), METRICS | {f"a_long_name/{i}": 1.0 + i for i in range(40)}
    Display(2000, console=pipe, verbose=True).update(1001, many, TIMINGS)
    words = {f"{name}={value:.4g}" for name, value in (many | TIMINGS).items()}
    assert {*text_of(pipe).split()} == words | {"step=1001/2000"} and text_of(pipe).count("\n") == 1
