"""Measurements as a person reads them: one table, on the screen and in the documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .measure import SKIPPED
from .problem import PRODUCT
from .record import Measurement

DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
ERRORS = {
    **{"logprob": "|Δlogp|", "loss": "|Δloss|", "hidden_gradient": "dX", "weight_gradient": "dW"},
    "behind": "behind",
}
_STATES = {"oom": "out of memory", "failed": "failed"}
_LETTERS = {"tokens": "N", "hidden": "H", "vocabulary": "V"}


def table(cells: Sequence[Measurement], *, brief: bool = False) -> tuple[str, list[str], list[list[str]]]:
    """Return title, heads and rows of all measurements but the skipped ones, the fastest first at each shape.

    The title has what all shapes agree on, the first columns have the rest. Empty columns are left out.

    Args:
        cells: the measurements.
        brief: leave out quartiles, rates and phases.
    """
    shown = [cell for cell in cells if cell.status != SKIPPED]
    shapes = [cell.shape for cell in shown]
    names = list(dict.fromkeys(name for shape in shapes for name in shape))
    varying = [name for name in names if any(s.get(name) != shapes[0].get(name) for s in shapes)]
    order = [*dict.fromkeys(map(repr, shapes))]
    shown.sort(key=lambda cell: (order.index(repr(cell.shape)), cell.median or math.inf))
    products = {repr(cell.shape): cell.median for cell in shown if cell.implementation == PRODUCT}
    rows = []
    for cell in shown:
        axes = {name: _words(name, cell.shape.get(name)) for name in varying}
        columns = _columns(cell, products.get(repr(cell.shape)), brief)
        rows.append({"implementation": cell.implementation} | axes | columns)
    heads = [head for head in rows[0] if any(row[head] for row in rows)] if rows else []
    constant = (_words(name, shapes[0].get(name)) for name in names if name not in varying)
    return ", ".join(filter(None, constant)), heads, [[row[head] or DASH for head in heads] for row in rows]


def _columns(cell: Measurement, product: float | None, brief: bool) -> dict[str, str]:
    """Return the text of each column, "" where there is nothing."""
    metrics = dict(cell.metrics)
    tokens, largest = metrics.pop("tokens", None), metrics.pop("largest_group", None)
    quartiles = DASH.join(number(1e3 * bound) for bound in cell.quartiles)
    found = {
        "largest group": f"{largest:,.0f}" if largest else "",
        "ms": number(1e3 * cell.median) if cell.median else "",
        "quartiles": "" if brief else quartiles,
        f"{TIMES} X Wᵀ": f"{cell.median / product:.2f}" if cell.median and product else "",
        "tokens/s": number(tokens / cell.median) if tokens and cell.median else "",
        "MiB": "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:,.0f}",
    }
    for name, symbol in ERRORS.items():
        found[symbol] = f"{cell.accuracy[name]:.1e}" if name in cell.accuracy else ""
    remarks = [" ".join(filter(None, (_STATES.get(cell.status), cell.reason)))]
    if not brief:
        remarks += [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in cell.phases.items()]
        remarks += [f"{name.replace('_', ' ')} {number(value)}" for name, value in metrics.items()]
    return found | {"remark": "; ".join(filter(None, remarks))}


def _words(name: str, value: Any) -> str:
    """Return one part of a shape, as in `rows peaked, N 16,384, frozen head`."""
    if name == "trainable":
        return "trainable head" if value else "frozen head"
    shown = number(value).replace("_", " ") if value is not None else ""
    return shown and f"{_LETTERS.get(name, name.replace('_', ' '))} {shown}"


def number(value: Any) -> str:
    """Return three digits of a float, all of a whole number."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table in Markdown, its first column left-aligned."""
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(heads) - 1), *lines[1:]])


def print_table(cells: Sequence[Measurement]) -> None:
    """Print one table, wide enough for every column where the output goes to a file."""
    title, heads, rows = table(cells)
    shown = Table(*heads, title=title)
    for row in rows:
        shown.add_row(*map(Text, row))
    if rows:
        Console(width=None if sys.stdout.isatty() else 170).print(shown)
