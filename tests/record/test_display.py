"""What a person sees: one line a step without a terminal, a panel on one, and no number made up."""

from __future__ import annotations

import io
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_fast.record.display import Display
from grpo_fast.record.logs import SampleRecord
from grpo_fast.record.summary import FIGURES

METRICS = {
    **{"reward/mean": 0.512, "reward/std": 0.301, "reward/correct/mean": 0.4, "reward/format/mean": 0.9},
    **{"groups/flat": 0.25, "kl": 0.0012, "completion/truncated": 0.0, "learning_rate": 2e-5},
}
TIMINGS = {"time/step": 6.6, "time/reward": 0.012, "tokens_per_second": 512.3, "memory/peak_bytes": 3 * 2**29}


class Utf8Stream(io.StringIO):
    encoding = "utf-8"


def terminal(width: int = 100) -> Console:
    options: Any = {"color_system": None, "legacy_windows": False}
    return Console(file=Utf8Stream(), force_terminal=True, width=width, **options)


def pipe() -> Console:
    return Console(file=Utf8Stream(), force_terminal=False, width=100)


def text_of(console: Console) -> str:
    return console.file.getvalue()


def test_without_a_terminal_each_step_is_one_line_of_key_value_words_that_are_not_zero():
    console, everything = pipe(), {figure.name: 12345678.9 for figure in FIGURES}

    with Display(40, console=console) as display:
        display.update(1, METRICS, TIMINGS)
        display.update(2, {"reward/mean": math.nan, "kl": math.inf}, {})
        display.evaluation(2, 0.217, (0.174, 0.267), 300)
        display.message("saved [bold]checkpoint[/bold] 10")
        display.rollout(0, 0, 64)  # on a terminal only
        display.update(3, everything | METRICS, everything)

    first, second, evaluation, message, full = text_of(console).splitlines()
    words = dict(word.split("=") for word in first.split())
    told = {"step": "1/40", "eta": "4m17s", "reward": "0.512", "reward_std": "0.301", "kl": "0.0012"}
    told |= {"flat": "25.0%", "t_reward": "12ms", "tok/s": "512", "mem": "1.5GiB", "t_step": "6.6s"}
    assert words == told | {"lr": "2e-05"} and first.isascii() and 100 < len(full) <= 160
    assert second == "step=2/40 eta=4m11s reward=nan kl=inf"
    assert evaluation == "evaluation step=2/40 score=0.217 low=0.174 high=0.267 n=300"
    assert message == "saved [bold]checkpoint[/bold] 10"


@pytest.mark.parametrize("width", [30, 100])
def test_the_panel_shows_the_step_its_rewards_and_scores_and_never_overflows_the_terminal(width: int):
    console = terminal(width)

    with Display(40, console=console) as display:
        display.evaluation(0, 0.217, (0.174, 0.267), 300)
        display.update(19, {"reward/mean": 0.1}, {})
        display.update(20, METRICS, TIMINGS)
        display.evaluation(20, 0.49, (0.434, 0.546), 300)

    text = text_of(console)
    assert max(len(line) for line in text.splitlines() if line.startswith(("│", "╭", "╰"))) <= width
    parts = ["20/40", "2m12s", "0.512", "0.301", "▁█", "correct 0.400", "25.0 %", "second 512", "12ms"]
    parts += ["21.7 % [17.4, 26.7] of 300 at step 0 → 49.0 % [43.4, 54.6] of 300 at step 20"]
    if width == 100:
        assert [part for part in parts if part not in text] == []
        assert "entropy" not in text  # which the run has not


def test_a_resumed_run_starts_where_it_was_and_an_error_leaves_the_terminal_as_it_was():
    console = terminal()

    with pytest.raises(RuntimeError), Display(40, console=console, start_step=12) as display:
        display.message("saved [bold]checkpoint[/bold]")
        raise RuntimeError

    text = text_of(console)
    assert "step 12/40" in text and "waiting for the first step" in text
    assert text.index("saved [bold]checkpoint[/bold]") < text.rindex("╭")
    assert "\x1b[?25h" in text.splitlines()[-1]  # the cursor is shown again


def test_a_terminal_shows_how_a_generation_goes_until_it_is_over(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("grpo_fast.record.display.time.monotonic", lambda: now[0])
    console, display = terminal(), Display(40)

    def panel(at: float, *rollout: int) -> str:
        now[0] = at
        display.rollout(*rollout)
        with console.capture() as captured:
            console.print(display.panel())
        return captured.get()

    assert re.search(r"0 of 64 completions +│", panel(100, 0, 0, 64))
    assert "16 of 64 completions · 1,200 tokens/s · 30.0s left" in panel(110, 12000, 16, 64)
    assert "tokens/s" not in panel(120, 50, 2, 64)  # fewer tokens: another generation, which has just begun
    assert "completions" not in panel(130, 20000, 64, 64)


def test_verbose_has_every_metric_of_a_step():
    console, many = pipe(), METRICS | {f"a_long_name_of_a_metric/{i}": 1.0 + i for i in range(40)}
    Display(2000, console=console, verbose=True).update(1001, many, TIMINGS)
    text = text_of(console)
    assert {f"{name}={value:.4g}" for name, value in (many | TIMINGS).items()} <= set(text.split())
    assert max(map(len, text.splitlines())) <= 160


def sample(group: int, completion: str, question: Any = "2 + 2?") -> SampleRecord:
    rewards = {"exact": 1.0, "format": None}
    return SampleRecord(group, question, "<user>2 + 2?", completion, rewards, 0.9, -0.7, True, 5)


def test_samples_are_shown_one_of_each_prompt_with_what_each_reward_gave():
    console = pipe()
    turns = [{"role": role, "content": f"turn {i}"} for i, role in enumerate(["user", "assistant"] * 4)]

    with Display(40, console=console) as display:
        display.samples([sample(0, "four"), sample(0, "five"), sample(1, "six", turns), sample(2, "ten")], 2)

    text = text_of(console)
    assert "2 + 2?" in text and "four" in text and "five" not in text and "ten" not in text
    assert "0.900 (exact 1.000, format not applicable), advantage -0.700, 5 tokens, trunc" in text
    assert re.search(r"user +turn 6\s+assistant +turn 7\s+completion  six", text) and "turn 1" not in text


def test_what_a_model_writes_is_shown_as_text_wrapped_and_without_its_middle():
    console, escape = terminal(60), "\x1b[2J\x07[bold]\udc80 \u200b\t|"

    with Display(40, console=console) as display:
        display.samples([sample(0, escape + "long " * 1000 + "end")], 1)

    text = text_of(console)
    shown = [line for line in text.splitlines() if "long" in line]
    assert 5 < len(shown) < 20 and max(map(len, shown)) <= 60
    assert "\\x1b[2J\\x07[bold]\\udc80 \\u200b" in text and "\x1b[2J" not in text
    assert re.search(r"\[… 4,\d\d\d\s+characters left out", text) and "end" in text


def test_a_notebooks_cell_is_drawn_anew_in_its_place(monkeypatch: pytest.MonkeyPatch):
    drawn: list[tuple[str, str]] = []

    class Output:
        def __getattr__(self, how: str) -> Any:
            return lambda panel: drawn.append((how, panel._repr_mimebundle_((), ())["text/html"]))

    page = SimpleNamespace(DisplayHandle=Output)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=page))
    monkeypatch.setitem(sys.modules, "IPython.display", page)

    with Display(40, console=Console(force_jupyter=True, file=Utf8Stream())) as display:
        display.update(1, METRICS, TIMINGS)

    assert [how for how, _ in drawn] == ["display", "update", "update"]
    assert "step 1/40" in drawn[-1][1] and "0.512" in drawn[-1][1]
