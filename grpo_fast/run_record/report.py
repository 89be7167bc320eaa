"""A run as one page: `report.html`, made from the run directory alone, readable offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.run_record.charts import draw_curves
from grpo_fast.run_record.files import CONFIG_FILE, write_whole
from grpo_fast.run_record.jsonl import read_jsonl
from grpo_fast.run_record.logs import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
    SAMPLES_FILE,
    TIMINGS_FILE,
)
from grpo_fast.run_record.summary import CONFIDENCE, duration_text, score_text

REPORT_FILE = "report.html"
SAMPLED_STEPS = 12  # that the page shows; a long run's page stays light

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run directory holds; a run that was interrupted has less."""

    name: str
    config: Mapping[str, Any]
    config_text: str
    metrics: list[Record]
    timings: list[Record]
    samples: list[Record]
    evaluations: list[Record]
    starts: list[Record]

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.metrics), default=0)

    @property
    def total_steps(self) -> int | None:
        return self.config.get("max_steps")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Works at any time: while the run goes on, after it was killed, and at its end.

    Raises:
        FileNotFoundError: `run_dir` holds nothing of a run.
        ValueError: one of its files is damaged other than by an unfinished last line.
        ModuleNotFoundError: matplotlib is missing.
    """
    page = _render(_read_run(run_dir))
    path = run_dir / REPORT_FILE
    write_whole(path, page.encode("utf-8", "backslashreplace"))
    return path


def _read_run(run_dir: Path) -> Run:
    names = (METRICS_FILE, TIMINGS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, PROVENANCE_FILE)
    config_path = run_dir / CONFIG_FILE
    if not any((run_dir / name).exists() for name in (*names, CONFIG_FILE)):
        raise FileNotFoundError(
            f"{run_dir} holds no run: none of {', '.join((*names, CONFIG_FILE))} is there"
        )
    text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    return Run(
        run_dir.resolve().name,
        yaml.safe_load(text) or {},
        text,
        *(read_jsonl(run_dir / name) for name in names),
    )


def _render(run: Run) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_packaged("report.html.j2"))
    samples, left_out = _samples_by_step(run.samples)
    return template.render(
        run=run,
        style=page_style(),
        status=_status(run),
        headlines=_headlines(run.evaluations),
        confidence=f"{100 * CONFIDENCE:.0f} %",
        facts=_facts(run),
        charts=draw_curves(run.metrics, run.timings, run.evaluations),
        samples=samples,
        left_out=left_out,
        table=_metric_table(run.metrics + run.timings),
    )


def page_style() -> str:
    """CSS of a page: light and dark, and the colours that `charts` draws with."""
    return _packaged("report.css")


def _packaged(name: str) -> str:
    return files("grpo_fast.run_record").joinpath(name).read_text(encoding="utf-8")


def _status(run: Run) -> str:
    if run.total_steps is None:
        return f"{run.last_step} steps"
    if run.last_step >= run.total_steps:
        return f"finished, {run.total_steps} steps"
    return f"not finished: step {run.last_step} of {run.total_steps}"


def _headlines(evaluations: Sequence[Record]) -> list[Record]:
    """For each held-out set its first and its last score."""
    headlines = []
    for name in dict.fromkeys(record["name"] for record in evaluations):
        records = [record for record in evaluations if record["name"] == name]
        scores = [
            {"text": score_text(r["score"], r["interval"]), "step": r["step"], "n": r["n"]} for r in records
        ]
        gain = 100 * (records[-1]["score"] - records[0]["score"])
        headlines.append(
            {
                "name": name,
                "before": scores[0],
                "after": scores[-1] if len(records) > 1 else None,
                "gain": f"{gain:+.1f} points",
            }
        )
    return headlines


def _facts(run: Run) -> dict[str, str]:
    """A few words on top of the page; those that the run has."""
    facts = {"Model": (run.config.get("model") or {}).get("path"), "Data": _data(run.config)}
    if run.starts:
        facts["Device"] = run.starts[-1]["device"]
        facts["Started"] = run.starts[0]["started"]
    if seconds := [r["time/step"] for r in run.timings if r.get("time/step") is not None]:
        facts["Time in steps"] = (
            f"{duration_text(sum(seconds))}, {duration_text(sum(seconds) / len(seconds))} each"
        )
    if rewards := [r["reward/mean"] for r in run.metrics if r.get("reward/mean") is not None]:
        facts["Reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    return {name: str(value) for name, value in facts.items() if value}


def _data(config: Mapping[str, Any]) -> str | None:
    return (config.get("dataset") or {}).get("source")


def _samples_by_step(samples: Sequence[Record]) -> tuple[list[Record], int]:
    """Steps with their samples, the completions of one prompt together; and how many steps are left out."""
    steps = [(step, list(records)) for step, records in groupby(samples, key=lambda record: record["step"])]
    shown = [steps[i] for i in _spread(len(steps), SAMPLED_STEPS)]
    return [
        {
            "step": step,
            "prompts": [
                {"prompt": prompt, "rows": list(rows)}
                for prompt, rows in groupby(records, key=lambda record: record["prompt"])
            ],
            "rewards": list(dict.fromkeys(name for record in records for name in record["rewards"])),
        }
        for step, records in shown
    ], len(steps) - len(shown)


def _spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices, evenly from the first to the last."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _metric_table(records: Sequence[Record]) -> list[Record]:
    """Every metric: first, last, smallest, largest value."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and value is not None:
                values.setdefault(name, []).append(value)
    return [
        {"name": name, "numbers": [f"{x:.4g}" for x in (column[0], column[-1], min(column), max(column))]}
        for name, column in sorted(values.items())
    ]
