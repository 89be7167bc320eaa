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
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment
from pydantic import TypeAdapter

from grpo_fast.record.summary import duration_text, score_text

from .accuracy import is_wrong
from .measure import SKIPPED
from .problem import PRODUCT
from .record import Measurement, Record
from .tables import DASH, ERRORS, OURS, STATES, label, number, shapes_of, split_axes

HERE = Path(__file__).resolve().parent
_REGION = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_OPENED = re.compile(r"<!-- table: ")


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

        def filled(region: re.Match[str], folder: Path = page.parent) -> str:
            path = options.results / f"{region['name']}.json"
            return f"{region[1]}{render(path, link=os.path.relpath(path, folder))}\n{region[4]}"

        after = _REGION.sub(filled, before)
        changed |= before != after
        if options.check:
            found, expected = before.splitlines(), after.splitlines()
            for line in difflib.unified_diff(found, expected, f"{page} is", "should be", n=0):
                print(line.rstrip("\n"))
        elif before != after:
            page.write_text(after, encoding="utf-8")
    return int(changed and options.check)


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
        "bias": bias,
        "score": lambda found: score_text(found["score"], found["interval"]),
        "duration": duration_text,
        "join_command": shlex.join,
    }
    template = templates.from_string((HERE / "readme.md.j2").read_text(encoding="utf-8"))
    if not (text := template.render(record=record, link=link).strip()):
        raise ValueError(f"{path} is of no kind that has a table: it holds {', '.join(record) or 'nothing'}")
    return text


def measurements(found: dict[str, Any]) -> dict[str, Any]:
    """Implementations down, the fastest at the first shape on top; shapes across, then the worst errors and
    the largest memory."""
    record = TypeAdapter(Record).validate_python(found)
    constant, varying = split_axes(record.cells)
    shapes = shapes_of(record.cells)
    cells = [cell for cell in record.cells if cell.status != SKIPPED]
    names = dict.fromkeys(cell.implementation for cell in cells)
    errors = [name for name in ERRORS if any(name in cell.accuracy for cell in cells)]
    has_memory = any(cell.peak_bytes is not None for cell in cells)
    unit = "largest group" if record.kind == "group" else "ms"
    heads = ["implementation", *(", ".join(filter(None, (label(of, varying), unit))) for of in shapes)]
    heads += [f"worst {ERRORS[name]}".replace("|", "\\|") for name in errors]
    heads += ["most extra MiB"] * has_memory

    rows: list[tuple[list[float], list[str]]] = []  # the times, and the text
    for name in names:
        mine = [cell for cell in cells if cell.implementation == name]
        at_shapes = [next((cell for cell in mine if cell.shape == shape), None) for shape in shapes]
        mark = "**" if name.startswith(OURS) else "*" if name == PRODUCT else ""
        row = [f"{mark}{name}{mark}", *map(_value, at_shapes)]
        row += [_worst([cell.accuracy[error] for cell in mine if error in cell.accuracy]) for error in errors]
        peaks = [cell.peak_bytes for cell in mine if cell.peak_bytes is not None]
        row += [f"{max(peaks) / 2**20:,.0f}" if peaks else DASH] * has_memory
        rows.append(([cell.time.median if cell and cell.time else math.inf for cell in at_shapes], row))
    rows.sort(key=itemgetter(0))
    absent = [cell for cell in record.cells if cell.status == SKIPPED and cell.implementation not in names]
    reasons = {cell.implementation: cell.reason for cell in absent}
    return {
        "heads": heads,
        "rows": [row for _, row in rows],
        "constant": label(constant),
        "skipped": [
            f"{', '.join(name for name in reasons if reasons[name] == reason)} ({reason})"
            for reason in dict.fromkeys(reasons.values())
        ],
    }


def _value(cell: Measurement | None) -> str:
    """The largest group, the time, or why there is none."""
    if cell is None:
        return DASH
    if "largest_group" in cell.metrics:
        return f"{cell.metrics['largest_group']:,.0f}"
    if cell.time is None:
        return STATES.get(cell.status, DASH)
    return f"{number(cell.time.median)}{' **wrong**' if is_wrong(cell.accuracy) else ''}"


def _worst(errors: Sequence[float]) -> str:
    """NaN is the worst."""
    largest = max(errors, key=lambda error: (math.isnan(error), error), default=None)
    return DASH if largest is None else f"{largest:.1e}"


def bias(record: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Heads and rows of three tables: batches at the default tolerance, tolerances at the largest batch with
    several, and means of draws. Errors of dX, dW and behind the head are in units of rounding's.
    """
    batches, tolerances, draws = [], {}, []
    for model in record["bias"]:
        name = f"V {model['vocabulary']:,}"
        for _, of_shape in groupby(model["cells"], lambda c: (c["tokens"], c["lengths"], c["mean"])):
            rounded, filtered, *cells = of_shape
            pairs = list(zip(cells[::2], cells[1::2], strict=True))
            tokens, rows = f"{rounded['tokens']:,}", []
            for drawn, dropped in pairs:
                kept = [f"{100 * drawn['density']:.2f} %", f"{drawn['entries']:.0f}"]
                errors = [_in_units(cell, rounded) for cell in (drawn, dropped, filtered)]
                certificate = f"{drawn['hidden_certificate']:.2f} · {drawn['weight_certificate']:.2f}"
                rows.append([name, tokens, f"{drawn['tolerance']:g}", *kept, certificate, *errors[:2]])
                if drawn["tolerance"] == record["default"]:
                    mean = f"{rounded['mean']}s of {' and '.join(f'{n:,}' for n in rounded['lengths'])}"
                    blocks = f"{100 * filtered['density']:.0f} %: {errors.pop()}"
                    batches.append([name, tokens, mean, f"{rounded['behind']:.1e}", *kept, *errors, blocks])
            if len(rows) > 1:
                tolerances[name] = rows
        of = model["draws"]
        means = [
            f"{of['ratio'][part]:.2f} ± {of['spread'][part]:.2f}" for part in ("hidden", "weight", "behind")
        ]
        draws.append([name, f"{of['tokens']:,}", f"{of['draws']}", *means])
    kept, errors = ["pairs kept", "entries a row"], ["drawn: dX · dW · behind", "dropped"]
    where = ["rows", "tokens"]
    yield [*where, "mean over", "rounding, behind", *kept, *errors, "Cut Cross Entropy's filter"], batches
    yield [*where, "tolerance", *kept, "certificate: dX · dW", *errors], [*chain(*tolerances.values())]
    yield [*where, "draws", "n·mean error² / mean of error²: dX", "dW", "behind"], draws


def _in_units(cell: dict[str, Any], rounded: dict[str, Any]) -> str:
    ratios = (cell[name] / rounded[name] for name in ("hidden", "weight", "behind"))
    return " · ".join(f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}" for ratio in ratios)
