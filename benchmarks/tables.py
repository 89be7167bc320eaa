"""Measurements as a person reads them: how shapes and numbers are said, and one table a shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .accuracy import is_wrong
from .contest import BYTES, FLOPS, TOKENS
from .measure import SKIPPED
from .problem import NAMES
from .record import Measurement

Shape = dict[str, Any]
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
OURS, REMARK = "ours", "remark"
STATES = {"oom": "out of memory", "failed": "failed"}
ERRORS = {"logprob": "|Δlogp|", "loss": "|Δloss|", "hidden_gradient": "dX", "weight_gradient": "dW"}
_RATES = {
    FLOPS: ("TFLOP/s", 1e12),
    BYTES: ("GB/s", 1e9),
    TOKENS: ("tokens/s", 1.0),
    "share_of_ceiling": ("of ceiling", 1.0),
}
_IN_THE_RECORD_ALONE = (
    *("output_bytes", "product_seconds", "first_call_seconds"),
    *("weight_error", "largest_scale"),
)
_BOUNDS = "_lower", "_upper"  # of a metric's interval
_LETTERS = {"tokens": "N", "hidden": "H", "vocabulary": "V"}
EXPLANATION = (
    "Times are medians of repetitions that took turns (A B C A B C), in milliseconds. TFLOP/s and GB/s of a "
    "head are of a dense computation: leaving work out raises them. |Δlogp|: largest error in nats; |Δloss|: "
    "absolute; dX and dW: relative errors, against an oracle in float64 (float32 on GPUs without). Memory: "
    "peak beyond the inputs, results included."
)


# Shapes and numbers ---------------------------------------------------------------------------------------


def shapes_of(cells: Sequence[Measurement]) -> list[Shape]:
    """Each once, in the order of the measurements."""
    return list({repr(cell.shape): cell.shape for cell in cells}.values())


def by_shape(
    cells: Sequence[Measurement], names: Sequence[str] | None = None
) -> Iterator[tuple[str, list[Measurement]]]:
    """The measurements at each shape, and how it is said by the names of the parts that tell it apart."""
    for shape in shapes_of(cells):
        yield label(shape, names) or label(shape), [cell for cell in cells if cell.shape == shape]


def split_axes(cells: Sequence[Measurement]) -> tuple[Shape, list[str]]:
    """What all shapes agree on, and the names of the rest."""
    shapes = shapes_of(cells)
    names = list(dict.fromkeys(name for shape in shapes for name in shape))
    varying = [name for name in names if any(s.get(name) != shapes[0].get(name) for s in shapes)]
    return {name: shapes[0].get(name) for name in names if name not in varying}, varying


def label(shape: Shape, names: Sequence[str] | None = None) -> str:
    """`forward + backward, peaked rows, N 16,384, H 2,048`: of these names, or of all."""
    values = {name: shape[name] for name in (names if names is not None else shape) if name in shape}
    if values.get("mode") == "forward":
        values.pop("trainable", None)
    return ", ".join(filter(None, (_words(name, value) for name, value in values.items())))


def _words(name: str, value: object) -> str:
    """Nothing for what is not there."""
    if name == "trainable":
        return "trainable head" if value else "frozen head"
    if value is None or isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    if name in ("mode", "dtype", "model"):
        return str(value).replace("_", " + ")
    if name == "rows":
        return f"{value} rows"
    if name == "loss":
        return NAMES.get(str(value), str(value))
    return f"{_LETTERS.get(name, name.replace('_', ' '))} {number(value)}"


def number(value: object) -> str:
    """Three digits of a float, all of a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


# Tables ---------------------------------------------------------------------------------------------------


class ShapeTable(NamedTuple):
    """Every measurement at one shape but those that were skipped, in the columns that anything stands in."""

    title: str
    heads: list[str]  # "implementation" the first
    rows: list[list[str]]  # the fastest first; "" where there is nothing


def shape_tables(cells: Sequence[Measurement], names: Sequence[str] | None = None) -> list[ShapeTable]:
    """In the order of the shapes; `names` as `by_shape` takes them."""
    found = []
    for title, here in by_shape([cell for cell in cells if cell.status != SKIPPED], names):
        here.sort(key=lambda cell: cell.time.median if cell.time else math.inf)
        rows = [_texts(cell) for cell in here]
        heads = [head for head in rows[0] if any(row[head] for row in rows)]
        found.append(ShapeTable(title, heads, [[row[head] for head in heads] for row in rows]))
    return found


def _texts(cell: Measurement) -> dict[str, str]:
    """By column; "" where there is nothing."""
    time, product = cell.time, cell.ceilings.get("product_seconds")
    found = {
        "implementation": cell.implementation,
        "ms": number(time.median) if time else "",
        "quartiles": f"{number(time.lower)}{DASH}{number(time.upper)}" if time else "",
        f"{TIMES} X Wᵀ": f"{time.median / product / 1e3:.2f}" if time and product else "",
    }
    for name, (unit, scale) in _RATES.items():
        found[unit] = number(cell.metrics[name] / scale) if name in cell.metrics else ""
    for part in ("allocator", "driver"):
        count = getattr(cell.memory, part, None)
        found[f"{part} MiB"] = "" if count is None else f"{count / 2**20:,.0f}"
    for name, symbol in ERRORS.items():
        found[symbol] = f"{cell.accuracy[name]:.1e}" if name in cell.accuracy else ""
    return found | {REMARK: _remark(cell)}


def _remark(cell: Measurement) -> str:
    """Status, and what has no column of its own; a metric with its interval, whose bounds stay out."""
    parts = [" ".join(filter(None, (STATES.get(cell.status), cell.reason)))]
    parts += ["INACCURATE"] * is_wrong(cell.accuracy)
    parts += [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in cell.phases.items()]
    for name, value in cell.metrics.items():
        if name not in (*_RATES, *_IN_THE_RECORD_ALONE) and not name.endswith(_BOUNDS):
            bounds = [f"{cell.metrics[name + end]:.2f}" for end in _BOUNDS if name + end in cell.metrics]
            interval = f" ({' to '.join(bounds)})" if bounds else ""
            parts.append(f"{name.replace('_', ' ')} {number(value)}{interval}")
    parts += [f"error of {name} {value:.1e}" for name, value in cell.accuracy.items() if name not in ERRORS]
    return "; ".join(filter(None, parts))


def console() -> Console:
    """The terminal, or wide enough for every column where the output goes to a file."""
    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=170)


def print_measurements(screen: Console, found: Sequence[Measurement]) -> None:
    """Nothing for no measurements."""
    for title, heads, rows in shape_tables(found):
        table = Table(title=title)
        for head in heads:
            is_text = head in ("implementation", REMARK)
            table.add_column(head, justify="left" if is_text else "right", overflow="fold")
        for row in rows:
            style = "bold" if row[0].startswith(OURS) else ""
            table.add_row(*(Text(text or DASH) for text in row), style=style)
        screen.print(table)
        screen.print()


def skipped(cells: Iterable[Measurement]) -> dict[tuple[str, str], None]:
    """Implementation and reason of what was skipped anywhere, each once."""
    return {(cell.implementation, cell.reason): None for cell in cells if cell.status == SKIPPED}
