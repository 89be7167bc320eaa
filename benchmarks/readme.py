"""`python -m benchmarks readme`: writes the tables of README.md from the checked-in records.

Between `<!-- table: NAME -->` and `<!-- end -->` stands the table of `benchmarks/results/NAME.json`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpo_fast.run_record.summary import duration_text, score_text

from .accuracy import is_wrong
from .measure import FAILED, OOM, SKIPPED
from .problem import PRODUCT
from .record import Measurement, Record
from .tables import DASH, ERRORS, OURS, label, shapes_of, split_axes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_OPENED = re.compile(r"<!-- table: ")
_STATES = {OOM: "OOM", FAILED: "failed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    parser.add_argument("--file", type=Path, default=ROOT / "README.md", help="README.md unless given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: no such file, a marker without its end, or a record that is missing or has no table.
    """
    if not options.file.is_file():
        raise ValueError(f"there is no {options.file}: run this in a checkout, or give --file")
    before = options.file.read_text(encoding="utf-8")
    if len(_REGION.findall(before)) != len(_OPENED.findall(before)):
        raise ValueError("a `<!-- table: NAME -->` has no `<!-- end -->`, or another table before it")

    def filled(region: re.Match[str]) -> str:
        return f"{region[1]}{render(options.results / (region['name'] + '.json'))}\n{region[4]}"

    after = _REGION.sub(filled, before)
    if options.check:
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "is", "should be", n=0):
            print(line.rstrip("\n"))
        return int(before != after)
    if before != after:
        options.file.write_text(after, encoding="utf-8")
    return 0


# One record -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """What of a record README.md shows."""

    heads: Sequence[str]
    rows: Iterable[Sequence[str]]
    environment: dict[str, Any]
    fact: str = ""  # of the line that says where the numbers were made
    command: Sequence[str] | None = None  # in place of the environment's
    below: Sequence[str] = ()  # lines


def render(path: Path) -> str:
    """The table of one file of `benchmarks/results`, with the line that says where it comes from.

    Raises:
        ValueError: the file is missing, or of no kind that has a table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json")))
        raise ValueError(f"{path} cannot be read as a record ({error}); there are {known}") from error
    keys = found.keys() if isinstance(found, dict) else set()
    show = next((show for needed, show in _KINDS.items() if {*needed} <= keys), None)
    if show is None:
        held = ", ".join(sorted(keys)) or "nothing"
        raise ValueError(f"{path} is of no kind that has a table: it holds {held}")
    shown: Shown = show(found)
    about = shown.environment
    origin = (
        shown.fact,
        about.get("benchmark_device", about["device"]),
        f"torch {about['versions']['torch']}",
        about["started"][:10],
        f"repeat: `{shlex.join(shown.command or about['command'])}`",
        f"[record](benchmarks/results/{path.name})",
    )
    table = _table(shown.heads, shown.rows)
    return "\n".join([*table, *shown.below, "", " · ".join(filter(None, origin))])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (heads, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(heads) - 1), *lines[1:]]


# Measurements ---------------------------------------------------------------------------------------------


def _record(found: Any) -> Shown:
    """Implementations down, shapes across: median times, worst errors, largest memory."""
    record = TypeAdapter(Record).validate_python(found)
    cells = record.cells
    constant, varying = split_axes(cells)
    shapes = shapes_of(cells)
    there = [cell for cell in cells if cell.status != SKIPPED and cell.implementation != PRODUCT]
    errors = [name for name in ERRORS if any(name in cell.accuracy for cell in there)]
    memory = any(cell.peak_bytes is not None for cell in there)
    value, unit = (_largest, "largest group") if record.kind == "group" else (_time, "ms")
    heads = [", ".join(filter(None, (label(shape, varying), unit))) for shape in shapes]
    heads += [f"worst {ERRORS[name]}" for name in errors] + ["most extra MiB"] * memory

    def row(name: str) -> tuple[list[float], list[str]]:
        """What sorts it, the time at the first shape, then the second, …; and the row."""
        mine = [cell for cell in there if cell.implementation == name]
        by_shape = [next((cell for cell in mine if cell.shape == shape), None) for shape in shapes]
        texts = [f"**{name}**" if name.startswith(OURS) else name, *map(value, by_shape)]
        texts += [_worst(cell.accuracy.get(error) for cell in mine) for error in errors]
        peak = max((cell.peak_bytes for cell in mine if cell.peak_bytes is not None), default=None)
        texts += [DASH if peak is None else f"{peak / 2**20:,.0f}"] * memory
        return [cell.time.median if cell and cell.time else math.inf for cell in by_shape], texts

    rows = [texts for _, texts in sorted((row(name) for name in _names(there)), key=lambda pair: pair[0])]
    products = {repr(cell.shape): cell.ceilings.get("product_seconds") for cell in cells}
    if any(products.values()):
        seconds = [products[repr(shape)] for shape in shapes]
        times = [DASH if second is None else _digits(1e3 * second) for second in seconds]
        rows.insert(0, [f"*{PRODUCT}*", *times, *[DASH] * (len(errors) + memory)])
    return Shown(
        ["implementation", *heads],
        rows,
        record.environment,
        fact=label(constant),
        below=_skipped(cells),
    )


def _names(cells: Iterable[Measurement]) -> list[str]:
    return list(dict.fromkeys(cell.implementation for cell in cells))


def _time(cell: Measurement | None) -> str:
    if cell is None or cell.time is None:
        return DASH if cell is None else _STATES.get(cell.status, DASH)
    return f"{_digits(cell.time.median)}{' **wrong**' if is_wrong(cell.accuracy) else ''}"


def _largest(cell: Measurement | None) -> str:
    size = cell and cell.metrics.get("largest_group")
    return _time(cell) if size is None else f"{size:,.0f}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _worst(errors: Iterable[float | None]) -> str:
    """NaN is the worst."""
    found = [error for error in errors if error is not None]
    return f"{max(found, key=lambda error: math.inf if math.isnan(error) else error):.1e}" if found else DASH


def _skipped(cells: Sequence[Measurement]) -> list[str]:
    """What was measured nowhere, by reason."""
    measured = _names(cell for cell in cells if cell.status != SKIPPED)
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        names = reasons.setdefault(cell.reason, [])
        if cell.implementation not in (*measured, *names):
            names.append(cell.implementation)
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items() if names]
    return ["", f"Not measured: {'; '.join(left_out)}."] if left_out else []


# Other kinds ----------------------------------------------------------------------------------------------


def _quickstart(found: dict[str, Any]) -> Shown:
    """Held-out score before and after, and the times, a seed a row."""
    rows = []
    for run in found["runs"]:
        before, after = run["before"], run["after"]
        scores = [score_text(score["score"], score["interval"]) for score in (before, after)]
        times = [duration_text(run[f"seconds_{part}"]) for part in ("training", "wall")]
        rows.append([str(run["seed"]), *scores, f"{100 * (after['score'] - before['score']):+.1f}", *times])
    return Shown(
        ["seed", "before", "after", "points", "training", "whole command"],
        rows,
        found["runs"][0]["provenance"],
        fact=f"{found['runs'][0]['after']['n']} held-out questions, 95 % intervals",
        command=["python", "-m", "benchmarks.quickstart", *found["overrides"]],
    )


def _side_by_side(found: dict[str, Any]) -> Shown:
    """The worst of loss, gradient norm and metrics over all losses and steps, by precision and variant."""
    rows = []
    for precision in dict.fromkeys(cell["precision"] for cell in found["cells"]):
        cells = [cell for cell in found["cells"] if cell["precision"] == precision]
        for name in (name for name in cells[0]["variants"] if name != "TRL"):
            mine = [cell["variants"][name] for cell in cells]
            gaps = [run["differences"] for run in mine if run["differences"]]
            others = [gap[metric] for gap in gaps for metric in gap if metric not in ("loss", "grad_norm")]
            compared, steps = (sum(run["steps_compared"] for run in mine), sum(c["steps"] for c in cells))
            worst = [_worst(gap[key] for gap in gaps) for key in ("loss", "grad_norm")]
            rows.append([name, precision, str(len(mine)), f"{compared} of {steps}", *worst, _worst(others)])
    heads = ["variant", "precision", "runs", "steps compared", "loss", "grad norm", "any metric"]
    return Shown(heads, rows, found["environment"], fact=f"model {found['model']}")


def _peer_suites(found: dict[str, Any]) -> Shown:
    """The peers' own tests on our functions: how many passed, and what was left out and why."""
    rows = []
    for name, suite in found["suites"].items():
        left_out = "; ".join(f"{count:,} {why}" for why, count in suite["reasons"]["deselected"].items())
        counts = [f"{suite[key]:,}" for key in ("passed", "failed", "skipped")]
        rows.append([name, suite["commit"][:8], *counts, left_out or DASH])
    heads = ["tests of", "revision", "passed", "failed", "skipped by themselves", "left out"]
    command = ["python", "-m", "benchmarks.peer_suites", "--source", "DIR"]
    return Shown(heads, rows, found["environment"], command=command)


def _tolerance_training(found: dict[str, Any]) -> Shown:
    """Final rewards with the certified gradient beside those with exact ones."""
    rows = [
        [name, *(f"{reward[key]:.3f}" for key in ("mean", "low", "high"))]
        for name, reward in found["summary"].items()
    ]
    heads = ["gradient of the head", "final reward", "lowest seed", "highest seed"]
    size = f"a toy with {found['vocabulary']:,} words, {found['steps']} steps"
    return Shown(heads, rows, found["environment"], fact=size)


_KINDS: dict[tuple[str, ...], Callable[[Any], Shown]] = {  # by keys that no other kind has
    ("schema",): _record,
    ("recipe",): _quickstart,
    ("model", "cells"): _side_by_side,
    ("suites",): _peer_suites,
    ("summary", "vocabulary"): _tolerance_training,
}
