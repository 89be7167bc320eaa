"""A run, or several compared, as one page: made from their folders alone, readable offline."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.config.record import CONFIG_FILE
from grpo_fast.config.tree import differences, value_at
from grpo_fast.data.types import spoken
from grpo_fast.record import logs
from grpo_fast.record.alerts import RULES
from grpo_fast.record.charts import SCORE, AlertSpan, Metrics, draw_curves
from grpo_fast.record.files import read_jsonl, write_whole
from grpo_fast.record.summary import CONFIDENCE, duration_text, excerpt, score_text

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
SAMPLED_STEPS = 12  # of a run, that the page shows; a long run's page stays light
PAGE_CHARACTERS = 2_000_000  # of completions and prompts, on the whole page
LARGEST = 1e300  # that is drawn: the difference of two such numbers is one
STEP, TEXT = {"step": int}, {"prompt": str, "completion": str, "question": str | list}
FIELDS: Mapping[str, Mapping[str, Any]] = {  # what every line of a file must have, and its type
    logs.METRICS_FILE: STEP,
    logs.TIMINGS_FILE: STEP,
    logs.SAMPLES_FILE: {**STEP, **TEXT, "group": int, "rewards": dict, "num_tokens": int, "truncated": bool},
    logs.EVALUATIONS_FILE: {**STEP, "name": str, "interval": list, "n": int},
    logs.ALERTS_FILE: {**STEP, "alert": str, "state": str, "text": str},
    logs.PROVENANCE_FILE: {"started": str, "command": list, "device": str, "versions": dict},
}

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord(Metrics):
    config: Mapping[str, Any]
    config_text: str
    files: Mapping[str, Sequence[Record]]  # those of FIELDS, each in the order of the steps

    @property
    def last(self) -> int:
        return max((records[-1].get("step", 0) for records in self.files.values() if records), default=0)

    @property
    def status(self) -> str:
        total, metrics = value_at(self.config, "max_steps"), self.files[logs.METRICS_FILE]
        step = metrics[-1]["step"] if metrics else 0
        if not isinstance(total, int):
            return f"{step} steps"
        return f"not finished: step {step} of {total}" if step < total else f"finished, {step} steps"

    @property
    def facts(self) -> dict[str, str]:
        """A few words on top of the page; those that the run has."""
        keys = {"Model": "model.path", "Data": "dataset.source"}
        facts = {name: value_at(self.config, key) for name, key in keys.items()}
        if starts := self.files[logs.PROVENANCE_FILE]:
            started = starts[0]["started"].replace("T", " ").replace("+00:00", " UTC")
            facts |= {"Device": starts[-1]["device"], "Started": started}
        if seconds := [*self.values.get("time/step", {}).values()]:
            mean = duration_text(sum(seconds) / len(seconds))
            facts["Time in steps"] = f"{duration_text(sum(seconds))}, {mean} each"
        if rewards := [*self.values.get("reward/mean", {}).values()]:
            facts["Reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        return {name: str(value) for name, value in facts.items() if value}

    @cached_property
    def groups(self) -> dict[int, list[list[Record]]]:
        """By sampled step the completions of each prompt, the best first."""

        def worst_last(record: Record) -> float:
            return math.inf if record.get("reward") is None else -record["reward"]

        found: dict[int, dict[int, list[Record]]] = {}
        for record in sorted(self.files[logs.SAMPLES_FILE], key=worst_last):
            found.setdefault(record["step"], {}).setdefault(record["group"], []).append(record)
        return {step: [found[step][group] for group in sorted(found[step])] for step in sorted(found)}

    @property
    def shown(self) -> list[int]:
        """The sampled steps of a short run; of a long one some, evenly from the first to the last."""
        steps, most = [*self.groups], SAMPLED_STEPS - 1
        return steps if len(steps) <= most else [steps[i * (len(steps) - 1) // most] for i in range(most + 1)]


def write_report(*run_dirs: Path, to: Path | None = None) -> Path:
    """Write one page of a run, or of several compared, and return its path.

    Works at any time: while a run goes on, after it was killed, and at its end.

    Args:
        run_dirs: the runs' folders, at least one.
        to: the page; by default `report.html` in the folder of the one run, `comparison.html` here.

    Raises:
        FileNotFoundError: one of `run_dirs` holds nothing of a run.
        ValueError: one of its files is damaged other than by an unfinished last line.
        OSError: the page cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    names = [run_dir.resolve().name for run_dir in run_dirs]
    if len(set(names)) < len(names):
        names = [str(run_dir) for run_dir in run_dirs]
    runs = [read_run(run_dir, name) for run_dir, name in zip(run_dirs, names, strict=True)]
    last = max(run.last for run in runs)
    shown = (record for run in runs for step in run.shown for group in run.groups[step] for record in group)
    texts = sum(max(1, len(record.get("messages") or ())) for record in shown)
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    script = packaged("report.js")
    page = jinja.from_string(packaged("report.html.j2")).render(
        runs=runs,
        last=last,
        curves=draw_curves(runs, last),
        differences=compared([run.config for run in runs]),
        excerpt=lambda text: excerpt(text, PAGE_CHARACTERS // max(texts, 100)),
        score_text=score_text,
        spoken=spoken,
        confidence=f"{100 * CONFIDENCE:.0f} %",
        style=packaged("report.css"),
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )
    path = to or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(COMPARISON_FILE))
    try:
        write_whole(path.resolve(), page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        elsewhere = "`grpo-fast report --output` writes it elsewhere"
        raise OSError(f"cannot write {path} ({error.strerror}); {elsewhere}") from error
    return path


def packaged(name: str) -> str:
    """A file of this room: report.css is also other pages' style, light and dark, in the same colours."""
    return files("grpo_fast.record").joinpath(name).read_text(encoding="utf-8")


def read_run(run_dir: Path, name: str) -> RunRecord:
    """A run's folder as far as it goes, called `name`; raises as `write_report` does."""
    if not any((run_dir / file).exists() for file in (CONFIG_FILE, *FIELDS)):
        names = ", ".join((CONFIG_FILE, *FIELDS))
        raise FileNotFoundError(f"{run_dir} holds no run: none of {names} is there; give a run's output_dir")
    path = run_dir / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        config = yaml.safe_load(text) or {}
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}, not keys and values")
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is no configuration ({problem}); repair or delete it") from error
    records = {}
    for file, fields in FIELDS.items():
        lines = read_jsonl(run_dir / file)
        for number, record in enumerate(lines, start=1):
            if wrong := [key for key, kind in fields.items() if not isinstance(record.get(key), kind)]:
                where = f"{run_dir / file}, line {number}"
                raise ValueError(f"{where}: no {wrong[0]!r} as a run writes it; repair or delete the line")
        records[file] = sorted(lines, key=lambda record: record.get("step", 0))
    return RunRecord(name, *_measured(records), config, text, records)


def _measured(records: Mapping[str, Sequence[Record]]) -> tuple[Any, Any, Any]:
    """What is drawn: metrics, timings and held-out scores, with intervals where they are known; alerts."""
    values: dict[str, dict[int, float]] = {}
    for record in (*records[logs.METRICS_FILE], *records[logs.TIMINGS_FILE]):
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and abs(value) < LARGEST:
                values.setdefault(name, {})[record["step"]] = value
    means, spread = values.get("reward/mean", {}), values.get("reward/std", {})
    bands = {"reward/mean": {s: (means[s] - spread[s], means[s] + spread[s]) for s in means if s in spread}}
    for record in records[logs.EVALUATIONS_FILE]:
        name, interval = f"{SCORE}{record['name']}", record["interval"]
        if record.get("score") is not None:
            values.setdefault(name, {})[record["step"]] = record["score"]
            if len(interval) == 2 and None not in interval:
                bands.setdefault(name, {})[record["step"]] = (interval[0], interval[1])
    alerts: dict[str, list[AlertSpan]] = {}
    for place, record in enumerate(records[logs.ALERTS_FILE], start=1):
        if record["state"] == "raised" and record["alert"] in RULES:
            later = (one for one in records[logs.ALERTS_FILE][place:] if one["alert"] == record["alert"])
            span = (record["step"], next((one["step"] for one in later), None), record["text"])
            alerts.setdefault(RULES[record["alert"]].metric, []).append(span)
    return values, bands, alerts


def compared(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The keys whose values are not the same in all runs, but for the folder, and each run's value."""
    known = [config for config in configs if config]
    keys = dict.fromkeys(key for config in known for key, _, _ in differences(known[0], config))
    rows = []
    for key in (key for key in keys if key != "output_dir"):
        values = [value_at(config, key) for config in configs]
        shown = [json.dumps(value, ensure_ascii=False, default=str) for value in values]
        rows.append((key, ["\N{EN DASH}" if text == "null" else text for text in shown]))
    return rows
