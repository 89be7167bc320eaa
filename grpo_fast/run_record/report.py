"""A run, or several compared, as one page: made from their folders alone, readable offline."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.run_record.alerts import RULES
from grpo_fast.run_record.charts import SCORE, AlertSpan, Columns, draw_curves
from grpo_fast.run_record.files import CONFIG_FILE, read_jsonl, write_whole
from grpo_fast.run_record.logs import (
    ALERTS_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    PROVENANCE_FILE,
    SAMPLES_FILE,
    TIMINGS_FILE,
)
from grpo_fast.run_record.summary import CONFIDENCE, duration_text, score_text

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
SAMPLED_STEPS = 12  # of a run, that the page shows; a long run's page stays light
PAGE_CHARACTERS = 2_000_000  # of completions and prompts, on the whole page
LARGEST = 1e300  # that is drawn: the difference of two such numbers is one
FIELDS: Mapping[str, Mapping[str, Any]] = {  # what every line of a file must have, and its type
    METRICS_FILE: {"step": int},
    TIMINGS_FILE: {"step": int},
    SAMPLES_FILE: {
        **{"step": int, "prompt": str, "completion": str, "rewards": dict},
        **{"num_tokens": int, "truncated": bool},
    },
    EVALUATIONS_FILE: {"step": int, "name": str, "interval": list, "n": int},
    ALERTS_FILE: {"step": int, "alert": str, "state": str, "text": str},
    PROVENANCE_FILE: {"started": str, "command": list, "device": str, "versions": dict},
}

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder holds."""

    name: str
    config: Mapping[str, Any]
    config_text: str
    files: Mapping[str, Sequence[Record]]  # by name, those of FIELDS
    columns: Columns

    @property
    def status(self) -> str:
        total = self.config.get("max_steps")
        last = max((record["step"] for record in self.files[METRICS_FILE]), default=0)
        if not isinstance(total, int):
            return f"{last} steps"
        return f"finished, {total} steps" if last >= total else f"not finished: step {last} of {total}"

    @property
    def facts(self) -> dict[str, str]:
        """A few words on top of the page; those that the run has."""
        settings = dict(_flat(self.config))
        facts = {"Model": settings.get("model.path"), "Data": settings.get("dataset.source")}
        if starts := self.files[PROVENANCE_FILE]:
            started = starts[0]["started"].replace("T", " ").replace("+00:00", " UTC")
            facts |= {"Device": starts[-1]["device"], "Started": started}
        if seconds := [*self.columns.values.get("time/step", {}).values()]:
            mean = duration_text(sum(seconds) / len(seconds))
            facts["Time in steps"] = f"{duration_text(sum(seconds))}, {mean} each"
        if rewards := [*self.columns.values.get("reward/mean", {}).values()]:
            facts["Reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        return {name: str(value) for name, value in facts.items() if value}

    @cached_property
    def groups(self) -> dict[int, list[list[Record]]]:
        """By step the completions of each prompt, the best first: of all sampled steps of a short run, of a
        long one's some, evenly from the first to the last."""
        steps = self.sampled
        if len(steps) > SAMPLED_STEPS:
            steps = [steps[round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)]
        found: dict[int, dict[Any, list[Record]]] = {step: {} for step in steps}
        for record in self.files[SAMPLES_FILE]:
            if record["step"] in found:
                group = record.get("group", record["prompt"])  # records of old have no number of theirs
                found[record["step"]].setdefault(group, []).append(record)
        return {step: [sorted(one, key=_worst_last) for one in found[step].values()] for step in steps}

    @property
    def sampled(self) -> list[int]:
        """The steps that have samples."""
        return sorted({record["step"] for record in self.files[SAMPLES_FILE]})


def _worst_last(record: Record) -> float:
    return math.inf if record.get("reward") is None else -record["reward"]


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
    texts = sum(len(group) for run in runs for groups in run.groups.values() for group in groups)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = packaged("report.js")
    page = environment.from_string(packaged("report.html.j2")).render(
        runs=runs,
        curves=draw_curves([run.columns for run in runs]),
        differences=differences(runs),
        excerpt=lambda text: excerpt(text, PAGE_CHARACTERS // max(texts, 100)),
        score=score_text,
        confidence=f"{100 * CONFIDENCE:.0f} %",
        style=packaged("report.css"),
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )
    path = to or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(COMPARISON_FILE))
    try:
        write_whole(path.resolve(), page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise OSError(
            f"cannot write {path} ({error.strerror}); `grpo-fast report --output` writes it elsewhere"
        ) from error
    return path


def packaged(name: str) -> str:
    """A file of this room: report.css is also other pages' style, light and dark, in the same colours."""
    return files("grpo_fast.run_record").joinpath(name).read_text(encoding="utf-8")


def read_run(run_dir: Path, name: str) -> RunRecord:
    """A run's folder as far as it goes, called `name`; raises as `write_report` does."""
    if not any((run_dir / file).exists() for file in (CONFIG_FILE, *FIELDS)):
        names = ", ".join((CONFIG_FILE, *FIELDS))
        raise FileNotFoundError(f"{run_dir} holds no run: none of {names} is there; give a run's output_dir")
    path = run_dir / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        config = yaml.safe_load(text) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no YAML ({' '.join(str(error).split())}); repair or delete it"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not keys and values; repair or delete it")
    records = {}
    for file, fields in FIELDS.items():
        lines = read_jsonl(run_dir / file)
        for number, record in enumerate(lines, start=1):
            if wrong := [key for key, kind in fields.items() if not isinstance(record.get(key), kind)]:
                where = f"{run_dir / file}, line {number}"
                raise ValueError(f"{where}: no {wrong[0]!r} as a run writes it; repair or delete the line")
        records[file] = sorted(lines, key=lambda record: record.get("step", 0))
    return RunRecord(name, config, text, records, _columns(name, records))


def _columns(run: str, records: Mapping[str, Sequence[Record]]) -> Columns:
    """What is drawn: metrics, timings and held-out scores, with intervals where they are known."""
    values: dict[str, dict[int, float]] = {}
    bands: dict[str, dict[int, tuple[float, float]]] = {}
    for record in (*records[METRICS_FILE], *records[TIMINGS_FILE]):
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and abs(value) < LARGEST:
                values.setdefault(name, {})[record["step"]] = value
    means, spread = values.get("reward/mean", {}), values.get("reward/std", {})
    bands["reward/mean"] = {s: (means[s] - spread[s], means[s] + spread[s]) for s in means if s in spread}
    for record in records[EVALUATIONS_FILE]:
        name, step, interval = f"{SCORE}{record['name']}", record["step"], record["interval"]
        if record.get("score") is not None:
            values.setdefault(name, {})[step] = record["score"]
            if len(interval) == 2 and None not in interval:
                bands.setdefault(name, {})[step] = (interval[0], interval[1])
    alerts: dict[str, list[AlertSpan]] = {}
    for place, record in enumerate(records[ALERTS_FILE]):
        if record["state"] == "raised" and record["alert"] in RULES:
            later = (one for one in records[ALERTS_FILE][place + 1 :] if one["alert"] == record["alert"])
            span = (record["step"], next((one["step"] for one in later), None), record["text"])
            alerts.setdefault(RULES[record["alert"]].metric, []).append(span)
    return Columns(run, values, bands, alerts)


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """The keys of the configuration whose values are not the same in all runs, and each run's value."""
    settings = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one if key != "output_dir")

    def text(one: Mapping[str, Any], key: str) -> str:
        return json.dumps(one[key], ensure_ascii=False, default=str) if key in one else "\N{EN DASH}"

    rows = [(key, [text(one, key) for one in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration's leaves by dotted key; of a list by place."""
    inner = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    if key and not inner:
        yield key, value
    for name, part in inner.items():
        yield from _flat(part, f"{key}.{name}" if key else str(name))


def excerpt(text: str, most: int) -> str:
    """A text of at most `most` characters: three quarters of them from its beginning, a quarter its end."""
    if len(text) <= most:
        return text
    end = most // 4
    left_out = f"\n\n[… {len(text) - most:,} characters left out; samples.jsonl has them …]\n\n"
    return text[: most - end] + left_out + text[-end:]
