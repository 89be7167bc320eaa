"""Plots of a record as inline SVG, in the house's colours: bars, lines, a Pareto front and a roofline."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_fast.run_record.charts import GRID, INK, SERIES, to_svg

from .record import FAILED, OOM, Measurement
from .roofline import Roof, points
from .shapes import LIMITS, Slice, is_wrong, label, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (5.2, 3.2)  # inches at 72 dpi: the SVG scales
BAR = 0.24  # inches of height each
OURS = "ours"
STATES = {OOM: "out of memory", FAILED: "failed"}
MOST_ZOOM = 100.0
_DASHES = ("-", (0, (4, 2)), (0, (1.2, 1.6)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NAMES = {"tokens": "tokens N", "hidden": "hidden size H", "vocabulary": "vocabulary V"}
PRODUCT = "one product X Wᵀ"


@dataclass(frozen=True)
class Plot:
    """A drawn plot and what stands above it."""

    title: str
    detail: str
    svg: str  # trusted markup, made here from numbers and escaped labels


@dataclass(frozen=True)
class Style:
    """How an implementation looks in every plot of a page."""

    colour: str
    dash: Any
    marker: str


@dataclass(frozen=True)
class Quantity:
    """Something that a measurement has one number of."""

    title: str
    value: Callable[[Measurement], float | None]
    interval: Callable[[Measurement], tuple[float, float] | None] = lambda cell: None
    more_is_better: bool = False


def milliseconds(cell: Measurement) -> float | None:
    return None if cell.time is None else cell.time.median


def mebibytes(cell: Measurement) -> float | None:
    """Peak beyond the inputs: by torch's allocator, or the system where that does not count."""
    memory = cell.memory
    if memory is None:
        return None
    count = memory.driver if memory.allocator is None else memory.allocator
    return None if count is None else count / 2**20


TIME = Quantity(
    "Time, ms", milliseconds, lambda cell: (cell.time.lower, cell.time.upper) if cell.time else None
)
MEMORY = Quantity("Peak memory beyond the inputs, MiB", mebibytes)
TOKENS = Quantity(
    "Tokens per second", lambda cell: cell.metrics.get("tokens_per_second"), more_is_better=True
)
GROUP = Quantity(
    "Largest group, completions", lambda cell: cell.metrics.get("largest_group"), more_is_better=True
)


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """Ours in the first colour, told apart by dashes; the others in the rest, told apart by all three."""
    ours = [name for name in names if name.startswith(OURS)]
    others = [name for name in names if not name.startswith(OURS)]
    colours = SERIES[1:]
    found = {name: Style(SERIES[0], _DASHES[i % 3], _MARKERS[i % 7]) for i, name in enumerate(ours)}
    for i, name in enumerate(others):
        cycle = i // len(colours)
        found[name] = Style(colours[i % len(colours)], _DASHES[cycle % 3], _MARKERS[(i + cycle) % 7])
    return found


def swatch(style: Style, name: str) -> str:
    """A line with its marker, for the legend."""
    figure, axes = _figure((0.42, 0.17))
    axes.axis("off")
    axes.plot([0, 1, 2], [0, 0, 0], color=style.colour, linestyle=style.dash, linewidth=1.6)
    axes.plot([1], [0], color=style.colour, marker=style.marker, markersize=5)
    return _svg(figure, "swatch", name)


def bars(cells: Sequence[Measurement], quantity: Quantity, title: str) -> Plot | None:
    """One shape: the best value on top; ours stand out, and the product's time is a dashed line."""
    found = [(cell, value) for cell in cells if (value := quantity.value(cell)) is not None]
    if not found:
        return None
    found.sort(key=lambda pair: pair[1], reverse=not quantity.more_is_better)
    found = [(cell, 0.0) for cell in cells if cell.status in STATES] + found
    product = _product(cells) if quantity is TIME else None
    figure, axes = _figure((SIZE[0], 0.55 + BAR * len(found)))
    places = range(len(found))
    all_ours = not any(cell.implementation.startswith(OURS) for cell in cells)
    for place, (cell, value) in enumerate(found):
        ours = all_ours or cell.implementation.startswith(OURS)
        axes.barh(place, value, height=0.62, color=SERIES[0 if ours else 5], alpha=0.85 if ours else 0.5)
        interval = quantity.interval(cell)
        end = value or product or 0.0
        if interval is not None:
            axes.hlines(place, *interval, color=INK, linewidth=1.0)
            end = max(value, interval[1])
        text = STATES.get(cell.status) or number(value) + "  wrong result" * is_wrong(cell)
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", color=INK, size=9)
    axes.set_yticks(places, [_plain(cell.implementation) for cell, _ in found])
    if product is not None:
        axes.axvline(product, color=INK, linestyle=_DASHES[2], linewidth=1.3, zorder=3)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    return Plot(quantity.title, title, _svg(figure, "bars", quantity.title, title))


def lines(group: Slice, quantity: Quantity, styles: dict[str, Style], detail: str) -> Plot | None:
    """A quantity against one number of the shape, both on logarithmic axes."""
    figure, axes = _figure(SIZE)
    drawn = 0
    for name in dict.fromkeys(cell.implementation for cell in group.cells):
        mine = sorted(
            (cell for cell in group.cells if cell.implementation == name),
            key=lambda cell: cell.shape[group.axis],
        )
        pairs = [(cell, value) for cell in mine if (value := quantity.value(cell))]
        places = [cell.shape[group.axis] for cell, _ in pairs]
        style = styles[name]
        axes.plot(
            places,
            [value for _, value in pairs],
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            markersize=4.5,
            linewidth=2.2 if name == OURS else 1.3,
            zorder=3 if name.startswith(OURS) else 2,
        )
        full = [cell.shape[group.axis] for cell in mine if cell.status == OOM]
        axes.plot(
            full,
            [0.97] * len(full),
            color=style.colour,
            marker="x",
            linestyle="",
            transform=axes.get_xaxis_transform(),
        )
        drawn += len(pairs)
    if not drawn:
        return None
    if quantity is TIME:
        places = sorted({cell.shape[group.axis] for cell in group.cells})
        products = [_product([c for c in group.cells if c.shape[group.axis] == x]) for x in places]
        axes.plot(places, [x or math.nan for x in products], color=INK, linestyle=_DASHES[2])
    _logarithmic(axes, sorted({cell.shape[group.axis] for cell in group.cells}))
    name = NAMES.get(group.axis, group.axis.replace("_", " "))
    axes.set_xlabel(name, color=INK, size=9.5)
    title = f"{quantity.title}, against {name}"
    return Plot(title, detail, _svg(figure, title, label(group.fixed)))


def pareto(
    cells: Sequence[Measurement], error: str, words: str, styles: dict[str, Style], title: str
) -> Plot | None:
    """One shape: error against time. The line joins what nothing else beats in both."""
    found = [(cell.time.median, cell.accuracy[error], cell) for cell in cells if _both(cell, error)]
    if len(found) < 2:
        return None
    figure, axes = _figure(SIZE)
    front: list[tuple[float, float]] = []
    for time, value, _ in sorted(found, key=lambda point: point[:2]):
        if not front or value < front[-1][1]:
            front.append((time, value))
    for time, value, cell in found:
        style = styles[cell.implementation]
        axes.plot([time], [value], color=style.colour, marker=style.marker, markersize=7, linestyle="")
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.set_xlim(front[0][0] / 1.25, 1.25 * max(time for time, _, _ in found))
    _widen(axes, [value for _, value, _ in found])
    _decimal_ticks(axes)
    edges = [(front[0][0], axes.get_ylim()[1]), *front, (axes.get_xlim()[1], front[-1][1])]
    axes.step(*zip(*edges, strict=True), where="post", color=INK, linewidth=1.0, zorder=1)
    if LIMITS[error] < axes.get_ylim()[1]:
        axes.axhline(LIMITS[error], color=INK, linestyle=_DASHES[1], linewidth=1.0)
        axes.annotate("wrong above", (1, LIMITS[error]), (-2, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", color=INK, size=8.5)  # fmt: skip
    axes.set_xlabel("time, ms", color=INK, size=9.5)
    return Plot(f"{words}, against time", title, _svg(figure, "pareto", error, title))


def roofline(cells: Sequence[Measurement], roof: Roof, styles: dict[str, Style]) -> Plot | None:
    """Achieved TFLOP/s against FLOPs per byte, beneath what was measured as possible."""
    found = points(cells)
    if not found:
        return None
    figure, axes = _figure(SIZE)
    ridge = roof.flops / roof.bytes
    left = min(ridge / 4, *(point.intensity / 2 for point in found))
    right = max(ridge * 4, *(point.intensity * 2 for point in found))
    axes.plot([left, ridge, right], [left * roof.bytes / 1e12, roof.flops / 1e12, roof.flops / 1e12],
              color=INK, linewidth=1.4)  # fmt: skip
    for point in found:
        style = styles[point.name]
        axes.plot([point.intensity], [point.flops / 1e12], color=style.colour, marker=style.marker,
                  markersize=6, linestyle="", alpha=0.85)  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    _decimal_ticks(axes)
    axes.set_xlabel("FLOPs per byte that must be moved", color=INK, size=9.5)
    detail = (
        f"ceilings measured here: {number(roof.flops / 1e12)} TFLOP/s, {number(roof.bytes / 1e9)} GB/s; "
        "of a dense computation, so leaving work out can rise above"
    )
    return Plot("TFLOP/s, against arithmetic intensity", detail, _svg(figure, "roofline"))


def phases(cells: Sequence[Measurement], title: str) -> tuple[Plot, tuple[str, ...]] | None:
    """One shape: the parts of a repetition, end to end; and the parts in the order of the colours."""
    found = [cell for cell in cells if cell.phases]
    if not found:
        return None
    names = tuple(dict.fromkeys(name for cell in found for name in cell.phases))[: len(SERIES)]
    figure, axes = _figure((SIZE[0], 0.6 + BAR * len(found)))
    found = found[::-1]
    left = [0.0] * len(found)
    for name, colour in zip(names, SERIES, strict=False):
        widths = [1e3 * cell.phases.get(name, 0.0) for cell in found]
        axes.barh(range(len(found)), widths, left=left, height=0.62, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), [_plain(cell.implementation) for cell in found])
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    return Plot("Time by phase, ms", title, _svg(figure, "phases", title)), names


def _both(cell: Measurement, error: str) -> bool:
    """A time, and an error that has a logarithm."""
    value = cell.accuracy.get(error, math.nan)
    return cell.time is not None and math.isfinite(value) and value > 0


def _widen(axes: Axes, values: Sequence[float]) -> None:
    """At least two decades, so that rounding noise does not look like a difference; one tick a decade."""
    low, high = min(values), max(values)
    margin = max(1.4, math.sqrt(MOST_ZOOM * low / high))
    axes.set_ylim(low / margin, high * margin)


def _product(cells: Sequence[Measurement]) -> float | None:
    """Milliseconds of X Wᵀ at the one shape of the cells."""
    known = (cell.ceilings["product_seconds"] for cell in cells if "product_seconds" in cell.ceilings)
    seconds = next(known, None)
    return None if seconds is None else 1e3 * seconds


def _svg(figure: Any, *what: str) -> str:
    """With identifiers that are short and, within a record, nobody else's."""
    return to_svg(figure, "p" + hashlib.sha256(repr(what).encode()).hexdigest()[:10])


def _figure(size: tuple[float, float]) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(which="both", colors=INK, labelsize=9.5, length=0, pad=4)
    axes.set_axisbelow(True)
    return figure, axes


def _logarithmic(axes: Axes, places: Sequence[float]) -> None:
    """Ticks at the measured values, and at round numbers upwards."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    _decimal_ticks(axes)
    axes.set_xticks(places, [_thousands(place) for place in places])
    axes.set_xticks([], minor=True)


def _decimal_ticks(axes: Axes) -> None:
    """Plain numbers instead of powers where a plain number is short; grid lines at the labelled ones."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if _decades(axis) < 2.2 else (1.0,), numticks=9)
        )
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _decades(axis: Any) -> float:
    low, high = axis.get_view_interval()
    return math.log10(high / low) if low > 0 else 9.0


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _thousands(value: float) -> str:
    """16384 -> 16k, 151936 -> 152k."""
    if value < 1000:
        return f"{value:g}"
    in_k = value / 1024 if value % 1024 == 0 else value / 1000
    return f"{in_k:.0f}k"


def _plain(text: str) -> str:
    """Dollars are no formulas."""
    return text.replace("$", r"\$")
