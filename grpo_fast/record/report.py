"""Write a run, or a comparison of several, as one HTML page that works offline."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.tree import differences, value_at
from grpo_fast.config.yaml_text import parse_yaml
from grpo_fast.data.types import spoken
from grpo_fast.record import logs
from grpo_fast.record.alerts import RULES
from grpo_fast.record.files import read_jsonl, write_whole
from grpo_fast.record.summary import FIGURES, excerpt

if TYPE_CHECKING:
    from pandas import DataFrame

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
SAMPLED_STEPS, CHARACTERS = 12, 4000  # the most steps with samples, and characters of a text
BUCKETS = 200  # points of a curve; longer runs are drawn as means in a band from minimum to maximum
LARGEST = 1e30  # larger values are not drawn
UNITS = {"%": (", %", 100.0), "bytes": (", GiB", 2.0**-30)}  # the title's end, and the factor
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "grpo_fast", "font.size": 9, "text.parse_math": False}
STYLE |= {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class RunRecord:
    """The records of a run's folder."""

    name: str  # the folder
    config: Mapping[str, Any]
    config_text: str
    outcome: str | None  # the held-out score before and after
    files: Mapping[str, Sequence[dict[str, Any]]]
    values: DataFrame  # a row per step, a column per metric; a band's columns begin with `low` and `high`
    samples: Sequence[dict[str, Any]]  # of the steps that are shown, best completion of a prompt first


def write_report(*run_dirs: Path, to: Path | None = None) -> Path:
    """Write the page of a run, or of a comparison, and return its path; the runs need not have ended.

    Args:
        to: the page; by default `report.html` in the run's folder, `comparison.html` here for several.

    Raises:
        FileNotFoundError: one of `run_dirs` does not hold a run.
        ValueError: a file is damaged, other than by an unfinished last line.
        OSError: the page cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    runs = [read_run(run_dir) for run_dir in run_dirs]
    loader = PackageLoader("grpo_fast.record", "")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    page = jinja.get_template("report.html.j2").render(
        runs=runs,
        charts=charts(runs),
        differences=compared([run.config for run in runs]),
        excerpt=lambda text: excerpt(text, CHARACTERS),
        spoken=spoken,
        value_at=value_at,
    )
    path = to or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(COMPARISON_FILE))
    try:
        write_whole(path.resolve(), page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}); name another page by --output") from error
    return path


def read_run(run_dir: Path) -> RunRecord:
    """Read a run's folder as far as it goes; raise as `write_report` does."""
    path = run_dir / CONFIG_FILE
    if not any((run_dir / file).exists() for file in (CONFIG_FILE, *logs.FILES)):
        raise FileNotFoundError(f"{run_dir} holds no run: there is no {CONFIG_FILE}; give a run's output_dir")
    records = {file: read_jsonl(run_dir / file) for file in logs.FILES}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        config, outcome = dict(parse_yaml(text) or {}), logs.held_out_outcome(run_dir)
        samples = sorted(records[logs.SAMPLES_FILE], key=lambda one: -(one["reward"] or 0))
        steps = sorted({one["step"] for one in samples}, reverse=True)
        shown = steps[:: -(-len(steps) // SAMPLED_STEPS) or 1]
        samples = [one for one in samples if one["step"] in shown]
        return RunRecord(str(run_dir), config, text, outcome, records, values_of(records), samples)
    except (ValueError, TypeError, KeyError) as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{run_dir} holds what no run has written ({problem})") from error


def values_of(records: Mapping[str, Sequence[dict[str, Any]]]) -> DataFrame:
    """Return a row per step with the metrics, timings, held-out scores and bands of the charts."""
    import pandas

    rows: dict[int, dict[str, float]] = {}
    for record in (*records[logs.METRICS_FILE], *records[logs.TIMINGS_FILE]):
        rows.setdefault(record["step"], {}).update(record)
    for record in records[logs.EVALUATIONS_FILE]:
        name, row = f"score/{record['name']}", rows.setdefault(record["step"], {})
        row[name], (row[f"low {name}"], row[f"high {name}"]) = record["score"], record["interval"]
    values = pandas.DataFrame.from_dict(rows, orient="index", dtype=float).sort_index()
    if {"reward/mean", "reward/std"} <= {*values}:
        values["low reward/mean"] = values["reward/mean"] - values["reward/std"]
        values["high reward/mean"] = values["reward/mean"] + values["reward/std"]
    return values[values.abs() < LARGEST]


def charts(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return (title, SVG) of all charts: one for each title, or for each metric of several runs."""
    names = sorted({name for run in runs for name in run.values})
    records = [record for run in runs for record in run.files[logs.EVALUATIONS_FILE]]
    criteria = dict.fromkeys(str(record["criterion"]) for record in records if record.get("criterion"))
    title = f"Held-out score, % ({' or '.join(criteria)})" if criteria else "Held-out score, %"
    titles = {name: (title, 100.0) for name in names if name.startswith("score/")}
    titles["reward/mean"] = ("Reward, mean ± standard deviation", 1.0)
    if len(parts := [name for name in names if re.fullmatch("reward/[^/]+/mean", name)]) > 1:
        titles |= dict.fromkeys(parts, ("Reward by part", 1.0))
    for figure in FIGURES:
        unit, factor = UNITS.get(figure.unit, ("", 1.0))
        title = "Seconds" if figure.name.startswith("time/") else f"{figure.title}{unit}"
        titles[figure.name] = title, factor
    drawn: dict[str, tuple[list[str], float]] = {}
    for name, (title, factor) in titles.items():
        if any(name in run.values and run.values[name].notna().any() for run in runs):
            title = title if len(runs) == 1 else f"{title} ({name})"
            drawn.setdefault(title, ([], factor))[0].append(name)
    return [(title, draw(runs, *some)) for title, some in drawn.items()]


def draw(runs: Sequence[RunRecord], names: Sequence[str], factor: float) -> str:
    """Draw metrics of one run, or one metric of several runs, as SVG; alerts are red lines."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.2))
        axes = figure.add_axes((0.15, 0.1, 0.83, 0.8))
        lowest, highest = 0.0, 0.0
        for place, (run, name) in enumerate((run, name) for run in runs for name in names):
            if name not in run.values:
                continue
            values = factor * run.values.dropna(subset=[name])
            bucket = [row * BUCKETS // max(BUCKETS, len(values)) for row in range(len(values))]
            low, high = (values.get(f"{end} {name}", values[name]).groupby(bucket) for end in ("low", "high"))
            steps, mean = (one.groupby(bucket) for one in (values.index.to_series(), values[name]))
            line, *_ = axes.plot(
                steps.min(), mean.mean(), gid="curve", marker="." if len(values) < 20 else ""
            )
            line.set(color=f"C{place}", label=run.name if len(runs) > 1 else name.removeprefix("score/"))
            lowest, highest = min(lowest, low.min().min()), max(highest, high.max().max())
            axes.fill_between(steps.min(), low.min(), high.max(), color=f"C{place}", alpha=0.15, linewidth=0)
            for alert in run.files[logs.ALERTS_FILE]:
                rule = RULES.get(alert["alert"])
                if alert["state"] == "raised" and rule and rule.metric == name:
                    axes.axvline(alert["step"], color="red", alpha=0.4)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(left=0)
        if lowest >= 0:  # so that noise does not look like a trend
            axes.set_ylim(0, None if highest > 0 else 1)
        axes.legend(fontsize=7)
        figure.savefig(file := io.StringIO(), format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg") :]


def compared(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each key that differs between the runs, except `output_dir`, and each run's value."""
    known = [config for config in configs if config]
    keys = dict.fromkeys(key for config in known for key, _, _ in differences(known[0], config))
    rows = [(key, [value_at(config, key) for config in configs]) for key in keys if key != "output_dir"]
    return [(key, [json.dumps(value, ensure_ascii=False, default=str) for value in row]) for key, row in rows]
