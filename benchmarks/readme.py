"""`python -m benchmarks readme`: writes the tables of README.md and docs/ from the checked-in records.

Between `<!-- table: NAME -->` and `<!-- end -->` stands the table of `benchmarks/results/NAME.json`, as
`readme.md.j2` writes it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from pydantic import TypeAdapter

from grpo_fast.run_record.summary import duration_text, score_text

from .accuracy import is_wrong
from .measure import FAILED, OOM, SKIPPED
from .problem import PRODUCT
from .record import Measurement, Record
from .tables import DASH, ERRORS, OURS, label, shapes_of, split_axes

HERE = Path(__file__).resolve().parent
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_OPENED = re.compile(r"<!-- table: ")
_STATES = {OOM: "OOM", FAILED: "failed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    pages = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))]
    parser.add_argument(
        "--files", type=Path, nargs="+", default=pages, help="README.md and docs/*.md unless given"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the records")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: no such file, a marker without its end, or a record that is missing or has no table.
    """
    changed = False
    for page in options.files:
        if not page.is_file():
            raise ValueError(f"there is no {page}: run this in a checkout, or give --files")
        before = page.read_text(encoding="utf-8")
        if len(_REGION.findall(before)) != len(_OPENED.findall(before)):
            raise ValueError(
                f"{page}: a `<!-- table: NAME -->` has no `<!-- end -->`, or another table before it"
            )
        after = _REGION.sub(partial(_filled, results=options.results, folder=page.parent), before)
        changed |= before != after
        if options.check:
            found, expected = before.splitlines(), after.splitlines()
            for line in difflib.unified_diff(found, expected, f"{page} is", "should be", n=0):
                print(line.rstrip("\n"))
        elif before != after:
            page.write_text(after, encoding="utf-8")
    return int(changed and options.check)


def _filled(region: re.Match[str], *, results: Path, folder: Path) -> str:
    path = results / f"{region['name']}.json"
    return f"{region[1]}{render(path, link=os.path.relpath(path, folder))}\n{region[4]}"


def render(path: Path, link: str) -> str:
    """The table of one file of `benchmarks/results`, with its origin and a `link` to the record.

    Raises:
        ValueError: the file is missing, or of no kind that has a table.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json")))
        raise ValueError(f"{path} cannot be read as a record ({error}); there are {known}") from error
    templates = Environment(trim_blocks=True, lstrip_blocks=True)
    templates.filters |= {
        "measurements": measurements,
        "side_by_side": side_by_side,
        "score": lambda found: score_text(found["score"], found["interval"]),
        "duration": duration_text,
        "join_command": shlex.join,
    }
    template = templates.from_string((HERE / "readme.md.j2").read_text(encoding="utf-8"))
    if not (text := template.render(record=record, link=link).strip()):
        raise ValueError(f"{path} is of no kind that has a table: it holds {', '.join(record) or 'nothing'}")
    return text


def measurements(found: dict[str, Any]) -> dict[str, Any]:
    """Implementations down, shapes across: median times, worst errors, largest memory."""
    record = TypeAdapter(Record).validate_python(found)
    constant, varying = split_axes(record.cells)
    shapes = shapes_of(record.cells)
    there = [cell for cell in record.cells if cell.status != SKIPPED and cell.implementation != PRODUCT]
    errors = [name for name in ERRORS if any(name in cell.accuracy for cell in there)]
    memory = any(cell.peak_bytes is not None for cell in there)
    value, unit = (_largest, "largest group") if record.kind == "group" else (_time, "ms")
    heads = [", ".join(filter(None, (label(shape, varying), unit))) for shape in shapes]
    heads += [f"worst {ERRORS[name]}".replace("|", "\\|") for name in errors] + ["most extra MiB"] * memory

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
    timed = [cell for cell in record.cells if "product_seconds" in cell.ceilings]
    if products := {repr(cell.shape): _digits(1e3 * cell.ceilings["product_seconds"]) for cell in timed}:
        times = [products.get(repr(shape), DASH) for shape in shapes]
        rows.insert(0, [f"*{PRODUCT}*", *times, *[DASH] * (len(errors) + memory)])
    return {
        "heads": ["implementation", *heads],
        "rows": rows,
        "constant": label(constant),
        "skipped": _skipped(record.cells),
    }


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
    absent = {cell.implementation: cell.reason for cell in cells if cell.implementation not in measured}
    by_reason: dict[str, list[str]] = {}
    for name, reason in absent.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]


def side_by_side(all_cells: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The worst of loss, gradient norm and metrics over all losses and steps, by precision and variant."""
    for precision in dict.fromkeys(cell["precision"] for cell in all_cells):
        cells = [cell for cell in all_cells if cell["precision"] == precision]
        for name in (name for name in cells[0]["variants"] if name != "TRL"):
            mine = [cell["variants"][name] for cell in cells]
            gaps = [run["differences"] for run in mine if run["differences"]]
            others = [gap[metric] for gap in gaps for metric in gap if metric not in ("loss", "grad_norm")]
            compared, steps = (sum(run["steps_compared"] for run in mine), sum(c["steps"] for c in cells))
            worst = [_worst(gap[key] for gap in gaps) for key in ("loss", "grad_norm")]
            yield [name, precision, str(len(mine)), f"{compared} of {steps}", *worst, _worst(others)]
