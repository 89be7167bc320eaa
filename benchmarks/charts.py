"""Plots of a record as inline SVG, in the house's colours: bars, lines, a Pareto front and a roofline."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

from .accuracy import LIMITS, is_wrong
from .contest import BYTES, FLOPS, TOKENS
from .measure import OOM
from .record import Measurement
from .tables import OURS, STATES, Shape, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Cells = Sequence[Measurement]
# matplotlib writes plain colours: these stand for the page's variables and are replaced in the SVG.
INK, GRID = "#010101", "#020202"
SERIES = ("#030303", "#040404", "#050505", "#060606", "#070707", "#080808")
VARIABLES = {INK: "var(--muted)", GRID: "var(--line)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, start=1)
}
SIZE = (5.2, 3.2)  # inches at 72 dpi: the SVG scales
BAR = 0.24  # inches of height each
MOST_ZOOM = 100.0
_DASHES = ("-", (0, (4, 2)), (0, (1.2, 1.6)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DRAWN = count()
_TEXT = {"color": INK, "size": 9}


@dataclass(frozen=True)
class Plot:
    """A drawn plot and what stands above it."""

    title: str
    detail: str
    svg: str  # trusted markup, made here from numbers and escaped labels
    legend: tuple[str, ...] = ()  # in the order of the colours, where it is not the page's


@dataclass(frozen=True)
class Style:
    """How an implementation looks in every plot of a page."""

    colour: str
    dash: Any
    marker: str

    def draw(self, axes: Axes, places: Sequence[float], values: Sequence[float], **more: Any) -> None:
        """Markers, and a line where `more` asks for one."""
        axes.plot(places, values, **{"color": self.colour, "marker": self.marker, "linestyle": ""} | more)


@dataclass(frozen=True)
class Quantity:
    """Something that a measurement has one number of."""

    title: str
    value: Callable[[Measurement], float | None]
    more_is_better: bool = False


TIME = Quantity("Time, ms", lambda cell: cell.time and cell.time.median)
MEMORY = Quantity("Peak memory beyond the inputs, MiB", lambda c: c.peak_bytes and c.peak_bytes / 2**20)
THROUGHPUT = Quantity("Tokens per second", lambda cell: cell.metrics.get(TOKENS), more_is_better=True)
GROUP = Quantity("Largest group, completions", lambda c: c.metrics.get("largest_group"), more_is_better=True)


@dataclass(frozen=True)
class Slice:
    """The measurements that differ in one number of their shape, and in the implementation."""

    axis: str
    fixed: Shape
    cells: list[Measurement]

    @property
    def places(self) -> list[float]:
        return sorted({cell.shape[self.axis] for cell in self.cells})


def slices(cells: Cells, axis: str) -> list[Slice]:
    """Groups that vary along one numeric axis alone, with at least two values of it; the longest first."""
    groups: dict[str, Slice] = {}
    for cell in cells:
        if type(cell.shape.get(axis)) in (int, float):
            fixed = {name: part for name, part in cell.shape.items() if name != axis}
            groups.setdefault(repr(fixed), Slice(axis, fixed, [])).cells.append(cell)
    return sorted((g for g in groups.values() if len(g.places) > 1), key=lambda group: -len(group.places))


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """Ours in the first colour, told apart by dashes; the others in the rest, told apart by all three."""
    ours = [name for name in names if name.startswith(OURS)]
    others = [name for name in names if not name.startswith(OURS)]
    found = {name: Style(SERIES[0], _DASHES[i % 3], _MARKERS[i % 7]) for i, name in enumerate(ours)}
    for i, name in enumerate(others):
        cycle, colour = divmod(i, len(SERIES) - 1)
        found[name] = Style(SERIES[1 + colour], _DASHES[cycle % 3], _MARKERS[(i + cycle) % 7])
    return found


def swatch(style: Style) -> str:
    """A line with its marker, for the legend."""
    figure, axes = _figure((0.42, 0.17))
    axes.axis("off")
    axes.plot([0, 1, 2], [0, 0, 0], color=style.colour, linestyle=style.dash, linewidth=1.6)
    style.draw(axes, [1], [0], markersize=5)
    return _svg(figure)


def bars(cells: Cells, quantity: Quantity, title: str) -> Plot | None:
    """One shape: the best value on top; ours stand out, and the product's time is a dashed line."""
    found = [(cell, value) for cell in cells if (value := quantity.value(cell)) is not None]
    if not found:
        return None
    found.sort(key=lambda pair: pair[1], reverse=not quantity.more_is_better)
    product = _product(cells) if quantity is TIME else None
    all_ours = all(cell.implementation.startswith(OURS) for cell, _ in found)
    found = [(cell, 0.0) for cell in cells if cell.status in STATES] + found
    figure, axes = _bar_figure([cell for cell, _ in found])
    for place, (cell, value) in enumerate(found):
        ours = all_ours or cell.implementation.startswith(OURS)
        axes.barh(place, value, height=0.62, color=SERIES[0 if ours else 5], alpha=0.85 if ours else 0.5)
        end = value or product or 0.0
        if quantity is TIME and cell.time is not None:
            axes.hlines(place, cell.time.lower, cell.time.upper, color=INK, linewidth=1.0)
            end = max(end, cell.time.upper)
        text = STATES.get(cell.status) or number(value) + "  wrong result" * is_wrong(cell.accuracy)
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", **_TEXT)
    if product is not None:
        axes.axvline(product, color=INK, linestyle=_DASHES[2], linewidth=1.3, zorder=3)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    return Plot(quantity.title, title, _svg(figure))


def phases(cells: Cells, title: str) -> Plot | None:
    """One shape: the parts of a repetition, end to end."""
    found = [cell for cell in reversed(cells) if cell.phases]
    if not found:
        return None
    names = tuple(dict.fromkeys(name for cell in reversed(found) for name in cell.phases))[: len(SERIES)]
    figure, axes = _bar_figure(found)
    for place, cell in enumerate(found):
        widths = [1e3 * cell.phases.get(name, 0.0) for name in names]
        starts = list(accumulate(widths, initial=0.0))[:-1]
        axes.barh(place, widths, left=starts, height=0.62, color=SERIES[: len(names)])
    return Plot("Time by phase, ms", title, _svg(figure), names)


def lines(group: Slice, quantity: Quantity, styles: dict[str, Style], detail: str) -> Plot | None:
    """A quantity against one number of the shape, both on logarithmic axes."""
    if not any(quantity.value(cell) for cell in group.cells):
        return None
    name = group.axis.replace("_", " ")
    figure, axes = _figure(SIZE, name)
    for implementation in dict.fromkeys(cell.implementation for cell in group.cells):
        style = styles[implementation]
        mine = [cell for cell in group.cells if cell.implementation == implementation]
        points = sorted((cell.shape[group.axis], value) for cell in mine if (value := quantity.value(cell)))
        width = 2.2 if implementation == OURS else 1.3
        how = {"linestyle": style.dash, "linewidth": width, "markersize": 4.5, "zorder": 3}
        style.draw(axes, [x for x, _ in points], [y for _, y in points], **how)
        full = [cell.shape[group.axis] for cell in mine if cell.status == OOM]
        style.draw(axes, full, [0.97] * len(full), marker="x", transform=axes.get_xaxis_transform())
    if quantity is TIME:
        products = [_product([c for c in group.cells if c.shape[group.axis] == x]) for x in group.places]
        axes.plot(group.places, [x or math.nan for x in products], color=INK, linestyle=_DASHES[2])
    _logarithmic(axes)
    axes.set_xticks(group.places, [number(place) for place in group.places])
    axes.set_xticks([], minor=True)
    title = f"{quantity.title}, against {name}"
    return Plot(title, detail, _svg(figure))


def pareto(cells: Cells, error: str, words: str, styles: dict[str, Style], title: str) -> Plot | None:
    """One shape: error against time. The line joins what nothing else beats in both."""
    found = [
        (cell.time.median, value, cell.implementation)
        for cell in cells
        if cell.time is not None and 0 < (value := cell.accuracy.get(error, math.nan)) < math.inf
    ]
    if len(found) < 2:
        return None
    figure, axes = _figure(SIZE, "time, ms")
    front: list[tuple[float, float]] = []
    for time, value, name in sorted(found):
        styles[name].draw(axes, [time], [value], markersize=7)
        if not front or value < front[-1][1]:
            front.append((time, value))
    right = 1.25 * max(time for time, _, _ in found)
    axes.set_xlim(front[0][0] / 1.25, right)
    # At least two decades, so that rounding noise does not look like a difference.
    low, high = (of(value for _, value, _ in found) for of in (min, max))
    margin = max(1.4, math.sqrt(MOST_ZOOM * low / high))
    axes.set_ylim(low / margin, high * margin)
    _logarithmic(axes)
    edges = zip((front[0][0], high * margin), *front, (right, front[-1][1]), strict=True)
    axes.step(*edges, where="post", color=INK, linewidth=1.0, zorder=1)
    if LIMITS[error] < high * margin:
        axes.axhline(LIMITS[error], color=INK, linestyle=_DASHES[1], linewidth=1.0)
        axes.annotate("wrong above", (right, LIMITS[error]), (-2, 3), textcoords="offset points",
                      ha="right", **_TEXT)  # fmt: skip
    return Plot(f"{words}, against time", title, _svg(figure))


def roofline(cells: Cells, copy_rate: float, styles: dict[str, Style]) -> Plot | None:
    """Achieved TFLOP/s against FLOPs per byte, beneath the fastest product and copy of the run.

    Args:
        copy_rate: bytes per second, of a copy that the run measured at its start.
    """
    found = [(c.implementation, c.metrics[FLOPS] / c.metrics[BYTES], c.metrics[FLOPS] / 1e12)
             for c in cells if c.metrics.get(BYTES) and c.metrics.get(FLOPS)]  # fmt: skip
    peak = max((cell.ceilings.get(FLOPS, 0.0) for cell in cells), default=0.0) / 1e12
    copy = max([copy_rate, *(cell.ceilings.get(BYTES, 0.0) for cell in cells)]) / 1e12
    if not found or not peak or not copy:
        return None
    figure, axes = _figure(SIZE, "FLOPs per byte that must be moved")
    ridge = peak / copy
    left = min(ridge / 4, *(intensity / 2 for _, intensity, _ in found))
    right = max(ridge * 4, *(intensity * 2 for _, intensity, _ in found))
    axes.plot([left, ridge, right], [left * copy, peak, peak], color=INK, linewidth=1.4)
    for name, intensity, rate in found:
        styles[name].draw(axes, [intensity], [rate], markersize=6, alpha=0.85)
    _logarithmic(axes)
    detail = (
        f"ceilings measured here: {number(peak)} TFLOP/s, {number(1e3 * copy)} GB/s; "
        "of a dense computation, so leaving work out can rise above"
    )
    return Plot("TFLOP/s, against arithmetic intensity", detail, _svg(figure))


def _product(cells: Cells) -> float | None:
    """Milliseconds of X Wᵀ at the one shape of the cells."""
    known = (cell.ceilings["product_seconds"] for cell in cells if "product_seconds" in cell.ceilings)
    seconds = next(known, None)
    return None if seconds is None else 1e3 * seconds


def _svg(figure: Figure) -> str:
    """Markup for a page: text as text, colours as variables, identifiers that no other drawing has."""
    import matplotlib

    target, prefix = io.StringIO(), f"p{next(_DRAWN)}"
    unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(target, format="svg", transparent=True, metadata=unnamed)
    markup = target.getvalue()
    markup = markup[markup.index("<svg") :]
    for colour, variable in VARIABLES.items():
        markup = markup.replace(colour, variable)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", markup)


def _figure(size: tuple[float, float], x_label: str = "") -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the page's plots need `pip install matplotlib`") from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(which="both", colors=INK, labelsize=9.5, length=0, pad=4)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, **_TEXT)
    return figure, axes


def _bar_figure(cells: Cells) -> tuple[Figure, Axes]:
    """With a place for each measurement, from below."""
    figure, axes = _figure((SIZE[0], 0.55 + BAR * len(cells)))
    names = [cell.implementation.replace("$", r"\$") for cell in cells]  # dollars are no formulas
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    return figure, axes


def _logarithmic(axes: Axes) -> None:
    """Both axes, with plain numbers; more of them where there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        few = math.log10(high / low) < 2.2
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=GRID, linewidth=0.8)
