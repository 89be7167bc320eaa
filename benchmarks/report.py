"""`python -m benchmarks report A.json [B.json …] --html OUT.html`: records as one page, readable offline."""

from __future__ import annotations

import argparse
import io
import json
import math
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from .contest import BYTES, FLOPS
from .measure import SKIPPED
from .record import Measurement, Record, read
from .tables import ERRORS, EXPLANATION, OURS, by_shape, label, number, shape_tables, skipped, split_axes

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
Curves = dict[str, list[tuple[float, float]]]  # points by implementation


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
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [_section(path, read(path)) for path in options.records]
    page = template.render(
        sections=sections, style=TEMPLATE.with_name("report.css").read_text("utf-8"), explanation=EXPLANATION
    )
    options.html.write_text(page, encoding="utf-8")
    print(f"written to {options.html}")
    return 0


def _section(path: Path, record: Record) -> dict[str, Any]:
    """One record, as the template takes it."""
    measured = [cell for cell in record.cells if cell.status != SKIPPED]
    everywhere = {cell.implementation for cell in measured}
    drawn = [cell for cell in measured if cell.shape.get("fit") is None]
    constant, varying = split_axes(drawn)
    copy = 1e9 * record.environment.get("copy_gigabytes_per_second", 0.0)
    kinds = bars(drawn, varying), lines(drawn, varying), fronts(drawn, varying), roofline(drawn, copy)
    return {
        "record": record,
        "file": path.name,
        "common": label(constant) if varying else "",
        "plots": [plot for plots in kinds for plot in islice(plots, MOST_PLOTS)],
        "tables": shape_tables(measured, varying),
        "skipped": [(name, reason) for name, reason in skipped(record.cells) if name not in everywhere],
        "provenance": dict(_provenance(record)),
    }


def bars(cells: Sequence[Measurement], varying: Sequence[str]) -> Iterator[Plot]:
    """A bar for each implementation, at one shape after the other."""
    for quantity, value_of in QUANTITIES.items():
        for title, here in by_shape(cells, varying):
            numbers = [(cell.implementation, value_of(cell)) for cell in here]
            if values := sorted([(name, value) for name, value in numbers if value], key=itemgetter(1)):
                yield quantity, title, image(partial(_draw_bars, values), height=0.8 + len(values) / 4)


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
            curves: dict[str, Curves] = {}  # by the other sizes
            for cell in cells:
                size, value = cell.shape.get(axis), value_of(cell)
                if type(size) in (int, float) and value:
                    at = curves.setdefault(label(cell.shape, others), {})
                    at.setdefault(cell.implementation, []).append((size, value))
            for fixed, of_names in curves.items():
                if max(map(len, of_names.values())) > 1:
                    yield f"{quantity}, against {axis}", fixed, _curves(of_names, axis)


def fronts(cells: Sequence[Measurement], varying: Sequence[str]) -> Iterator[Plot]:
    """Error against time at one shape after the other; a line joins those that no other beats in both."""
    for error in ("hidden_gradient", "logprob"):
        for title, here in by_shape(cells, varying):
            points: Curves = {}
            for cell in here:
                if cell.time and 0 < cell.accuracy.get(error, 0.0) < math.inf:
                    points[cell.implementation] = [(cell.time.median, cell.accuracy[error])]
            front: list[tuple[float, float]] = []
            for (point,) in sorted(points.values()):
                if not front or point[1] < front[-1][1]:
                    front.append(point)
            if len(points) > 1:
                yield f"Error of {ERRORS[error]}, against time", title, _curves(points, "ms", front)


def roofline(cells: Sequence[Measurement], copy: float) -> Iterator[Plot]:
    """TFLOP/s against FLOPs per byte, beneath the fastest product and copy of the run.

    Args:
        copy: bytes per second, of a copy that the run measured at its start.
    """
    points: Curves = {}
    for cell in cells:
        flops, moved = cell.metrics.get(FLOPS), cell.metrics.get(BYTES)
        if flops and moved:
            points.setdefault(cell.implementation, []).append((flops / moved, flops / 1e12))
    peak = max((cell.ceilings.get(FLOPS, 0.0) for cell in cells), default=0.0)
    copy = max([copy, *(cell.ceilings.get(BYTES, 0.0) for cell in cells)])
    if points and peak and copy:
        intensities = [intensity for of_name in points.values() for intensity, _ in of_name]
        left, ridge, right = min(peak / copy, *intensities), peak / copy, max(peak / copy, *intensities)
        roof = [(left / 2, left / 2 * copy / 1e12), (ridge, peak / 1e12), (right * 2, peak / 1e12)]
        detail = f"ceilings measured here: {number(peak / 1e12)} TFLOP/s, {number(copy / 1e9)} GB/s"
        yield "TFLOP/s, against FLOPs per byte", detail, _curves(points, "FLOPs per byte", roof)


def _curves(curves: Curves, x_label: str, edge: Sequence[tuple[float, float]] = ()) -> str:
    """On logarithmic axes; the edge is a line without marks."""

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            axes.loglog(*zip(*sorted(points), strict=True), marker="o", label=name)
        if edge:
            axes.loglog(*zip(*edge, strict=True), color="black", linewidth=1.0)
        axes.set_xlabel(x_label)
        axes.figure.legend(loc="outside lower center", ncols=2)

    return image(draw, height=4.0)


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
