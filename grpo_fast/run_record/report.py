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
from grpo_fast.run_record.files import CONFIG_FILE, read_jsonl, write_whole
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
class RunFiles:
    """What a run directory holds; a run that was interrupted has less."""

    name: str
    config_text: str
    metrics: list[Record]
    timings: list[Record]
    samples: list[Record]
    evaluations: list[Record]
    starts: list[Record]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Works at any time: while the run goes on, after it was killed, and at its end.

    Raises:
        FileNotFoundError: `run_dir` holds nothing of a run.
        ValueError: one of its files is damaged other than by an unfinished last line.
        ModuleNotFoundError: matplotlib is missing.
    """
    names = (METRICS_FILE, TIMINGS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, PROVENANCE_FILE)
    config_path, path = run_dir / CONFIG_FILE, run_dir / REPORT_FILE
    if not any((run_dir / name).exists() for name in (*names, CONFIG_FILE)):
        raise FileNotFoundError(
            f"{run_dir} holds no run: none of {', '.join((*names, CONFIG_FILE))} is there"
        )
    text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    page = _render(RunFiles(run_dir.resolve().name, text, *(read_jsonl(run_dir / name) for name in names)))
    write_whole(path, page.encode("utf-8", "backslashreplace"))
    return path


def _render(run: RunFiles) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    config = yaml.safe_load(run.config_text) or {}
    samples, left_out = _samples_by_step(run.samples)
    return environment.from_string(_packaged("report.html.j2")).render(
        run=run,
        style=page_style(),
        status=_status(run, config.get("max_steps")),
        headlines=_headlines(run.evaluations),
        confidence=f"{100 * CONFIDENCE:.0f} %",
        facts=_facts(run, config),
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


def _status(run: RunFiles, total: int | None) -> str:
    last = max((record["step"] for record in run.metrics), default=0)
    if total is None:
        return f"{last} steps"
    return f"finished, {total} steps" if last >= total else f"not finished: step {last} of {total}"


def _headlines(evaluations: Sequence[Record]) -> list[Record]:
    """For each held-out set its first and its last score."""
    headlines = []
    for name in dict.fromkeys(record["name"] for record in evaluations):
        records = [record for record in evaluations if record["name"] == name]
        scored = [{**r, "text": score_text(r["score"], r["interval"])} for r in records]
        first, last = scored[0], scored[-1]
        gain = f"{100 * (last['score'] - first['score']):+.1f} points"
        after = last if len(records) > 1 else None
        headlines.append({"name": name, "before": first, "after": after, "gain": gain})
    return headlines


def _facts(run: RunFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """A few words on top of the page; those that the run has."""
    model, dataset = config.get("model") or {}, config.get("dataset") or {}
    facts = {"Model": model.get("path"), "Data": dataset.get("source")}
    if run.starts:
        facts |= {"Device": run.starts[-1]["device"], "Started": run.starts[0]["started"]}
    if seconds := _values(run.timings, "time/step"):
        mean = duration_text(sum(seconds) / len(seconds))
        facts["Time in steps"] = f"{duration_text(sum(seconds))}, {mean} each"
    if rewards := _values(run.metrics, "reward/mean"):
        facts["Reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    return {name: str(value) for name, value in facts.items() if value}


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def _samples_by_step(samples: Sequence[Record]) -> tuple[list[Record], int]:
    """Steps with their samples, the completions of one prompt together; and how many steps are left out."""
    steps = [(step, list(records)) for step, records in groupby(samples, key=lambda record: record["step"])]
    indices = list(range(len(steps)))
    if len(steps) > SAMPLED_STEPS:  # evenly from the first to the last
        indices = [round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1)) for i in range(SAMPLED_STEPS)]
    return [
        {
            "step": step,
            "prompts": [
                {"prompt": prompt, "rows": list(rows)}
                for prompt, rows in groupby(records, key=lambda record: record["prompt"])
            ],
            "rewards": list(dict.fromkeys(name for record in records for name in record["rewards"])),
        }
        for step, records in (steps[i] for i in indices)
    ], len(steps) - len(indices)


def _metric_table(records: Sequence[Record]) -> list[Record]:
    """Every metric: first, last, smallest, largest value."""
    names = sorted({name for record in records for name in record} - {"step"})
    columns = {name: _values(records, name) for name in names}
    return [
        {"name": name, "numbers": [f"{x:.4g}" for x in (column[0], column[-1], min(column), max(column))]}
        for name, column in columns.items()
        if column
    ]
