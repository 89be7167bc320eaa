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
from pathlib import Path
from typing import Any

from grpo_fast.run_record.summary import duration_text, score_text

from .accuracy import is_wrong
from .measure import FAILED, OOM, SKIPPED
from .problem import PRODUCT
from .record import Measurement, read
from .tables import DASH, ERRORS, conclusions, label, number, shapes_of, split_axes

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
    regions = list(_REGION.finditer(before))
    if len(regions) != len(_OPENED.findall(before)):
        raise ValueError("a `<!-- table: NAME -->` has no `<!-- end -->`, or another table before it")
    after = _REGION.sub(
        lambda region: f"{region[1]}{_table_of(region, options.results)}\n{region[4]}", before
    )
    if options.check:
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "is", "should be", n=0):
            print(line.rstrip("\n"))
        return int(before != after)
    if before != after:
        options.file.write_text(after, encoding="utf-8")
    return 0


def _table_of(region: re.Match[str], results: Path) -> str:
    path = results / f"{region['name']}.json"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in results.glob("*.json")))
        raise ValueError(f"<!-- table: {region['name']} --> has no {path.name}; there are {known}")
    return render(path)


def render(path: Path) -> str:
    """The table of one file of `benchmarks/results`, with the line that says where it comes from.

    Raises:
        ValueError: the file is missing, or of no kind that has a table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a record: {error}") from error
    keys = found.keys() if isinstance(found, dict) else set()
    for needed, table in _KINDS.items():
        if {*needed} <= keys:
            return "\n".join(table(found, path))
    raise ValueError(
        f"{path} is of no kind that has a table: it holds {', '.join(sorted(keys)) or 'nothing'}"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (heads, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(heads) - 1), *lines[1:]]


def _origin(
    environment: dict[str, Any],
    path: Path,
    first: str = "",
    *,
    driver: str = "",
    command: Sequence[str] | None = None,
) -> list[str]:
    """The line that says where the numbers above were made, and how to make them again."""
    device = environment.get("benchmark_device", environment["device"])
    versions, date = f"torch {environment['versions']['torch']}", environment["started"][:10]
    repeat = f"repeat: `{shlex.join(command or environment['command'])}`"
    facts = [first, device, driver, versions, date, repeat, _link(path)]
    return ["", " · ".join(filter(None, facts))]


def _link(path: Path) -> str:
    return f"[record](benchmarks/results/{path.name})"


def _record(_: Any, path: Path) -> list[str]:
    """Implementations down, shapes across: median times, worst errors, largest memory."""
    record = read(path)
    concluded = conclusions(record.cells)
    cells = [cell for cell in record.cells if cell not in concluded] or record.cells
    constant, varying = split_axes(cells)
    shapes = shapes_of(cells)
    there = [cell for cell in cells if cell.status != SKIPPED and cell.implementation != PRODUCT]
    errors = [name for name in ERRORS if any(name in cell.accuracy for cell in there)]
    memory = any(cell.peak_bytes is not None for cell in there)
    value, unit = (_largest, "largest group") if record.kind == "group" else (_time, "ms")
    heads = [", ".join(filter(None, (label(shape, varying), unit))) for shape in shapes]
    heads += [f"worst {ERRORS[name]}" for name in errors] + ["most extra MiB"] * memory
    products = _products(cells, shapes)
    rows = [[f"*{PRODUCT}*", *products, *[DASH] * (len(errors) + memory)]] if any(products) else []
    for name in sorted({cell.implementation: None for cell in there}, key=_speed(there, shapes)):
        mine = [cell for cell in there if cell.implementation == name]
        row = [value(next((cell for cell in mine if cell.shape == shape), None)) for shape in shapes]
        row += [_worst(cell.accuracy.get(error) for cell in mine) for error in errors]
        row += [_mebibytes(mine)] * memory
        rows.append([f"**{name}**" if name.startswith("ours") else name, *row])
    driver = next((f"driver {state['driver_version']}" for state in record.gpu_states if state), "")
    origin = _origin(record.environment, path, label(constant), driver=driver)
    others = _concluded(concluded) + _skipped(record.cells)
    return [*_table(["implementation", *heads], rows), *others, *origin]


def _concluded(cells: Sequence[Measurement]) -> list[str]:
    """A table of its own for what follows from the measurements."""
    if not cells:
        return []
    names = list(dict.fromkeys(name for cell in cells for name in cell.metrics))
    rows = []
    for cell in cells:
        metrics = [number(cell.metrics[name]) if name in cell.metrics else DASH for name in names]
        rows.append([cell.implementation, label(cell.shape), *metrics])
    return ["", *_table(["implementation", "of", *(name.replace("_", " ") for name in names)], rows)]


def _products(cells: Sequence[Measurement], shapes: Sequence[dict[str, Any]]) -> list[str]:
    """The ceiling of the head, where it was measured."""
    known = {repr(cell.shape): seconds for cell in cells if (seconds := cell.ceilings.get("product_seconds"))}
    times = [known.get(repr(shape)) for shape in shapes]
    return [DASH if seconds is None else _digits(1e3 * seconds) for seconds in times] if known else []


def _speed(cells: Sequence[Measurement], shapes: Sequence[dict[str, Any]]) -> Callable[[str], list[float]]:
    """Sorts by the time at the first shape, then the second, ...; what has none comes last."""
    times = {(cell.implementation, repr(cell.shape)): cell.time.median for cell in cells if cell.time}
    return lambda name: [times.get((name, repr(shape)), math.inf) for shape in shapes]


def _time(cell: Measurement | None) -> str:
    if cell is None:
        return DASH
    if cell.time is None:
        return _STATES.get(cell.status, DASH)
    return f"{_digits(cell.time.median)}{' **wrong**' if is_wrong(cell.accuracy) else ''}"


def _largest(cell: Measurement | None) -> str:
    size = None if cell is None else cell.metrics.get("largest_group")
    return _time(cell) if size is None else f"{size:,.0f}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _worst(errors: Iterable[float | None]) -> str:
    """NaN is the worst."""
    found = [error for error in errors if error is not None]
    return f"{max(found, key=lambda error: math.inf if math.isnan(error) else error):.1e}" if found else DASH


def _mebibytes(cells: Sequence[Measurement]) -> str:
    found = [cell.peak_bytes for cell in cells if cell.peak_bytes is not None]
    return f"{max(found) / 2**20:,.0f}" if found else DASH


def _skipped(cells: Sequence[Measurement]) -> list[str]:
    """What was measured nowhere, by reason."""
    measured = {cell.implementation for cell in cells if cell.status != SKIPPED}
    reasons: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.implementation not in measured:
            reasons.setdefault(cell.reason, {})[cell.implementation] = None
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return ["", f"Not measured: {'; '.join(left_out)}."] if left_out else []


def quickstart_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: held-out score before and after, and the times, a seed a row."""
    rows = []
    for run in runs:
        before, after = run["before"], run["after"]
        rows.append(
            [
                str(run["seed"]),
                score_text(before["score"], before["interval"]),
                score_text(after["score"], after["interval"]),
                f"{100 * (after['score'] - before['score']):+.1f}",
                duration_text(run["seconds_training"]),
                duration_text(run["seconds_wall"]),
            ]
        )
    return _table(["seed", "before", "after", "points", "training", "whole command"], rows)


def _quickstart(found: dict[str, Any], path: Path) -> list[str]:
    first = found["runs"][0]
    questions = f"{first['after']['n']} held-out questions, 95 % intervals"
    command = ["python", "-m", "benchmarks.quickstart", *found["overrides"]]
    return quickstart_table(found["runs"]) + _origin(first["provenance"], path, questions, command=command)


def _side_by_side(found: dict[str, Any], path: Path) -> list[str]:
    """The worst of loss, gradient norm and metrics over all losses and steps, by precision and variant."""
    rows = []
    for precision in dict.fromkeys(cell["precision"] for cell in found["cells"]):
        cells = [cell for cell in found["cells"] if cell["precision"] == precision]
        for name in (name for name in cells[0]["variants"] if name != "TRL"):
            mine = [cell["variants"][name] for cell in cells]
            gaps = [run["differences"] for run in mine if run["differences"]]
            others = [gap[metric] for gap in gaps for metric in gap if metric not in ("loss", "grad_norm")]
            compared, steps = (sum(run["steps_compared"] for run in mine), sum(c["steps"] for c in cells))
            worst = [_worst(gap["loss"] for gap in gaps), _worst(gap["grad_norm"] for gap in gaps)]
            counts = [str(len(mine)), f"{compared} of {steps}"]
            rows.append([name, precision, *counts, *worst, _worst(others)])
    heads = ["variant", "precision", "runs", "steps compared", "loss", "grad norm", "any metric"]
    model = f"model {found['model']}"
    return _table(heads, rows) + _origin(found["environment"], path, model)


def _peer_suites(found: dict[str, Any], path: Path) -> list[str]:
    """The peers' own tests on our functions: how many passed, and what was left out and why."""
    rows = []
    for name, suite in found["suites"].items():
        left_out = "; ".join(f"{count:,} {why}" for why, count in suite["reasons"]["deselected"].items())
        counts = [f"{suite[key]:,}" for key in ("passed", "failed", "skipped")]
        rows.append([name, suite["commit"][:8], *counts, left_out or DASH])
    heads = ["tests of", "revision", "passed", "failed", "skipped by themselves", "left out"]
    command = ["python", "-m", "benchmarks.peer_suites", "--source", "DIR"]
    return _table(heads, rows) + _origin(found["environment"], path, command=command)


def _tolerance_training(found: dict[str, Any], path: Path) -> list[str]:
    """Final rewards with the certified gradient beside those with exact ones."""
    rows = [
        [name, *(f"{reward[key]:.3f}" for key in ("mean", "low", "high"))]
        for name, reward in found["summary"].items()
    ]
    size = f"a toy with {found['vocabulary']:,} words, {found['steps']} steps"
    heads = ["gradient of the head", "final reward", "lowest seed", "highest seed"]
    return _table(heads, rows) + _origin(found["environment"], path, size)


_KINDS: dict[tuple[str, ...], Callable[[Any, Path], list[str]]] = {  # by keys that no other kind has
    ("schema",): _record,
    ("recipe",): _quickstart,
    ("model", "cells"): _side_by_side,
    ("suites",): _peer_suites,
    ("summary", "vocabulary"): _tolerance_training,
}
