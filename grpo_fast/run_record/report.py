"""A run as one page: `report.html`, made from the run directory alone, readable offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.run_record.charts import draw_curves, series
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


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Works at any time: while the run goes on, after it was killed, and at its end.

    Raises:
        FileNotFoundError: `run_dir` holds nothing of a run.
        ValueError: one of its files is damaged other than by an unfinished last line.
        ModuleNotFoundError: matplotlib is missing.
    """
    from jinja2 import Environment, StrictUndefined

    names = (METRICS_FILE, TIMINGS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, PROVENANCE_FILE)
    if not any((run_dir / name).exists() for name in (*names, CONFIG_FILE)):
        raise FileNotFoundError(
            f"{run_dir} holds no run: none of {', '.join((*names, CONFIG_FILE))} is there"
        )
    config_path = run_dir / CONFIG_FILE
    config_text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    config = yaml.safe_load(config_text) or {}
    metrics, timings, samples, evaluations, starts = (read_jsonl(run_dir / name) for name in names)
    shown = _steps_to_show(samples)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_packaged("report.html.j2")).render(
        name=run_dir.resolve().name,
        config_text=config_text,
        starts=starts,
        style=page_style(),
        last=max((record["step"] for record in metrics), default=0),
        total=config.get("max_steps"),
        evaluations=evaluations,
        score=lambda record: score_text(record["score"], record["interval"]),
        confidence=f"{100 * CONFIDENCE:.0f} %",
        facts=_facts(config, metrics, timings, starts),
        charts=draw_curves(metrics + timings, evaluations),
        samples=[record for record in samples if record["step"] in shown],
        sampled=len({record["step"] for record in samples}),
        table=_metric_table(metrics + timings),
    )
    path = run_dir / REPORT_FILE
    write_whole(path, page.encode("utf-8", "backslashreplace"))
    return path


def page_style() -> str:
    """CSS of a page: light and dark, and the colours that `charts` draws with."""
    return _packaged("report.css")


def _packaged(name: str) -> str:
    return files("grpo_fast.run_record").joinpath(name).read_text(encoding="utf-8")


def _facts(
    config: Mapping[str, Any], metrics: Sequence[Record], timings: Sequence[Record], starts: Sequence[Record]
) -> dict[str, str]:
    """A few words on top of the page; those that the run has."""
    model, dataset = config.get("model") or {}, config.get("dataset") or {}
    facts = {"Model": model.get("path"), "Data": dataset.get("source")}
    if starts:
        facts |= {"Device": starts[-1]["device"], "Started": starts[0]["started"]}
    if seconds := series(timings, "time/step").values():
        mean = duration_text(sum(seconds) / len(seconds))
        facts["Time in steps"] = f"{duration_text(sum(seconds))}, {mean} each"
    if rewards := [*series(metrics, "reward/mean").values()]:
        facts["Reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    return {name: str(value) for name, value in facts.items() if value}


def _steps_to_show(samples: Sequence[Record]) -> list[int]:
    """All sampled steps of a short run; of a long one some, evenly from the first to the last."""
    steps = sorted({record["step"] for record in samples})
    if len(steps) <= SAMPLED_STEPS:
        return steps
    return [steps[round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)]


def _metric_table(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Every metric that has values: its first, last, smallest and largest."""
    names = sorted({name for record in records for name in record} - {"step"})
    columns = {name: [*series(records, name).values()] for name in names}
    return [
        (name, [f"{x:.4g}" for x in (column[0], column[-1], min(column), max(column))])
        for name, column in columns.items()
        if column
    ]
