"""`python -m benchmarks report A.json [B.json …] --html OUT.html`: records as one page, readable offline."""

from __future__ import annotations

import argparse
import io
import json
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.run_record.report import packaged

from .measure import SKIPPED
from .record import Measurement, Record, read
from .tables import EXPLANATION, OURS, label, number, shape_tables, shapes_of, skipped, split_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_PLOTS = 6  # of each kind
QUANTITIES: dict[str, Callable[[Measurement], float | None]] = {
    "Time, ms": lambda cell: cell.time and cell.time.median,
    "Peak memory beyond the inputs, MiB": lambda cell: cell.peak_bytes and cell.peak_bytes / 2**20,
    "Largest group, completions": lambda cell: cell.metrics.get("largest_group"),
}
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}
Plot = tuple[str, str, str]  # what it shows, at which shape, and the address of its image
Points = list[tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    parser.add_argument("--html", type=Path, required=True, metavar="OUT")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a file that is no record, or a folder that does not exist.
        ModuleNotFoundError: matplotlib is missing.
    """
    if not options.html.resolve().parent.is_dir():
        raise ValueError(f"--html {options.html}: its folder does not exist")
    page = render([(path, read(path)) for path in options.records])
    options.html.write_text(page, encoding="utf-8")
    print(f"written to {options.html}")
    return 0


def render(records: Sequence[tuple[Path, Record]]) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [_section(path, record) for path, record in records]
    return template.render(sections=sections, style=packaged("report.css"), explanation=EXPLANATION)


def _section(path: Path, record: Record) -> dict[str, Any]:
    """One record, as the template takes it."""
    measured = [cell for cell in record.cells if cell.status != SKIPPED]
    everywhere = {cell.implementation for cell in measured}
    constant, varying = split_axes([cell for cell in measured if cell.time] or measured)
    plots = [*islice(bars(measured, varying), MOST_PLOTS), *islice(lines(measured, varying), MOST_PLOTS)]
    return {
        "record": record,
        "file": path.name,
        "common": label(constant) if varying else "",
        "plots": plots,
        "tables": shape_tables(measured, varying),
        "skipped": [(name, reason) for name, reason in skipped(record.cells) if name not in everywhere],
        "provenance": dict(_provenance(record)),
    }


def bars(cells: Sequence[Measurement], varying: Sequence[str]) -> Iterator[Plot]:
    """A bar for each implementation, at one shape after the other."""
    for quantity, value_of in QUANTITIES.items():
        for shape in shapes_of(cells):
            numbers = [(cell.implementation, value_of(cell)) for cell in cells if cell.shape == shape]
            values = sorted([(name, value) for name, value in numbers if value], key=itemgetter(1))
            if values:
                address = image(partial(_draw_bars, values), height=0.8 + len(values) / 4)
                yield quantity, label(shape, varying) or label(shape), address


def _draw_bars(values: Sequence[tuple[str, float]], axes: Axes) -> None:
    for name, value in values:
        drawn = axes.barh(name, value, color="C0" if name.startswith(OURS) else "C7")
        axes.bar_label(drawn, [number(value)], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)


def lines(cells: Sequence[Measurement], varying: Sequence[str]) -> Iterator[Plot]:
    """A line for each implementation, along one size after the other while all else stays."""
    for quantity, value_of in QUANTITIES.items():
        for axis in varying:
            others = [name for name in varying if name != axis]
            curves: dict[str, dict[str, Points]] = {}  # by the other sizes and by implementation
            for cell in cells:
                size, value = cell.shape.get(axis), value_of(cell)
                if type(size) in (int, float) and value:
                    at = curves.setdefault(label(cell.shape, others), {})
                    at.setdefault(cell.implementation, []).append((size, value))
            for fixed, of_names in curves.items():
                if max(map(len, of_names.values())) > 1:
                    address = image(partial(_draw_lines, axis, of_names), height=4.0)
                    yield f"{quantity}, against {axis}", fixed, address


def _draw_lines(size_name: str, curves: Mapping[str, Points], axes: Axes) -> None:
    for name, points in curves.items():
        axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=name)
    sizes = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(sizes, [number(size) for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(size_name)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.figure.legend(loc="outside lower center", ncols=2)


def image(draw: Callable[[Axes], None], height: float) -> str:
    """The address of an SVG image that holds all of itself; `height` in inches."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the page's plots need `pip install matplotlib`") from error
    target = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(target, format="svg")
    return f"data:image/svg+xml;base64,{b64encode(target.getvalue()).decode()}"


def _provenance(record: Record) -> Iterator[tuple[str, str]]:
    """Everything needed to judge the run or to repeat it."""
    states = [state for state in record.gpu_states if state]
    found = record.environment | {
        "command": shlex.join(record.environment.get("command", [])),
        "first and last clocks": [*states[:1], *states[-1:]],
        "rows": record.notes,
        "options": record.options,
        "stopped": record.stopped,
    }
    for name, value in found.items():
        if value:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield name.replace("_", " ").capitalize(), text
