"""Curves of one run, or of several over the same steps: the geometry that the report's template draws."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_fast.record.summary import FIGURES

Points = Sequence[tuple[int, float]]
AlertSpan = tuple[int, int | None, str]
"""(step of an alert, step where it cleared if it did, its text)"""

LEFT, RIGHT, TOP, BOTTOM = 46, 328, 8, 150  # the box of the curves, in the SVG's units
BUCKETS = 200  # of a long run's steps, each drawn by its smallest and its largest value
SMOOTHING = 20  # the bold line averages a twentieth of the run

SCORE = "score/"  # before the name of a set of held-out questions
REWARD = re.compile(r"reward/([^/]+)/mean")
UNITS = {"%": (", %", 100.0), "bytes": (", GiB", 2.0**-30), "s": (", seconds", 1.0)}  # (words, factor)


@dataclass(frozen=True)
class Metrics:
    """What one run measured, by metric."""

    name: str  # of the run
    values: Mapping[str, Mapping[int, float]]  # step -> value, where there is one, in the order of the steps
    bands: Mapping[str, Mapping[int, tuple[float, float]]]  # step -> (low, high)
    alerts: Mapping[str, Sequence[AlertSpan]]


@dataclass(frozen=True)
class Line:
    """A curve, its places in the SVG's units as "x,y x,y …"."""

    label: str
    place: int  # among the lines of the chart: gives the colour
    points: str
    values: str  # "step:value step:value …", one for each point
    mean: str  # the moving average; none for a short run
    band: str  # around the area
    last: str  # the newest value


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Sequence[Line]
    values: Sequence[tuple[float, str]]  # of the vertical axis: (y, text)
    steps: Sequence[tuple[float, str]]  # of the horizontal one: (x, text)
    alerts: Sequence[tuple[float, float, str]]  # (x, width, text)


def draw_curves(runs: Sequence[Metrics], last: int) -> tuple[list[Chart], list[Chart], list[tuple[str, str]]]:
    """Charts up to the step `last` of all that moved, those of `FIGURES` and the rest, and (title, value) of
    what never did. One run's metrics of one title share a chart; of several runs each metric has its own."""
    names = sorted({name for run in runs for name in run.values})
    parts = {name: ("Reward by function", 1.0) for name in names if REWARD.fullmatch(name)}
    first = {name: ("Held-out score, %", 100.0) for name in names if name.startswith(SCORE)}
    first |= {"reward/mean": ("Reward, mean ± standard deviation", 1.0)}
    if len(parts) > 1:
        first |= parts
    for figure in FIGURES:
        unit, factor = UNITS.get(figure.unit, ("", 1.0))
        title = f"{figure.title[0].upper()}{figure.title[1:]}{unit}"
        first[figure.name] = ("Seconds", 1.0) if figure.name.startswith("time/") else (title, factor)
    rest = {name: (name, 1.0) for name in names if name not in {*first, *parts, "eval/score"}}
    still: list[tuple[str, str]] = []

    def draw(wanted: Mapping[str, tuple[str, float]]) -> list[Chart]:
        metrics: dict[str, list[str]] = {}
        shared = Counter(title for title, _ in wanted.values())
        for name, (title, factor) in wanted.items():
            full = f"{title}: {_label(name)}" if shared[title] > 1 else title
            values = [value for run in runs for value in run.values.get(name, {}).values()]
            if len({float(f"{value:.9g}") for value in values}) > 1:  # what differs by less is rounding
                metrics.setdefault(title if len(runs) == 1 else full, []).append(name)
            elif values:
                still.append((full, _text(factor * values[0])))
        return [_chart(title, wanted[one[0]][1], runs, one, last) for title, one in metrics.items()]

    return draw(first), draw(rest), still


def _label(name: str) -> str:
    """Of a metric among those of one title."""
    part = REWARD.fullmatch(name)
    return part[1] if part else name.partition("/")[2] or name


def _chart(title: str, factor: float, runs: Sequence[Metrics], names: Sequence[str], last: int) -> Chart:
    """Some metrics of one run, or one of several runs; a run that lacks it keeps its colour all the same."""
    tracks = enumerate((run, name) for run in runs for name in names)
    found = [(place, run, name) for place, (run, name) in tracks if name in run.values]
    numbers = [value for _, run, name in found for value in run.values[name].values()]
    numbers += [end for _, run, name in found for ends in run.bands.get(name, {}).values() for end in ends]
    low, high = factor * min(numbers), factor * max(numbers)

    def x_of(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * step / max(1, last), 1)

    def y_of(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    def path(points: Points) -> str:
        return " ".join(f"{x_of(step):g},{y_of(factor * value):g}" for step, value in points)

    lines, alerts = [], []
    for place, run, name in found:
        label = run.name if len(runs) > 1 else _label(name)
        points = [*run.values[name].items()]
        kept, band = _thin(points), run.bands.get(name, {})
        ends = [(step, band[step]) for step, _ in kept if step in band]
        around = [(step, down) for step, (down, _) in ends] + [(step, up) for step, (_, up) in ends[::-1]]
        texts = [_text(factor * value) for _, value in kept]
        values = " ".join(f"{step}:{text}" for (step, _), text in zip(kept, texts, strict=True))
        mean = path(_moving_average(points))
        lines.append(Line(label, place, path(kept), values, mean, path(around), texts[-1]))
        for begin, end, text in run.alerts.get(name, ()):
            width = max(2.0, x_of(last if end is None else end) - x_of(begin))
            alerts.append((x_of(begin), width, text if len(runs) == 1 else f"{label}: {text}"))
    steps = [(x_of(step), text) for step, text in _ticks(0, max(1, last), 6, least=1)]
    return Chart(title, lines, [(y_of(value), text) for value, text in _ticks(low, high, 5)], steps, alerts)


def _thin(points: Points) -> Points:
    """A long run's points: the first and the last, and of every bucket the smallest and the largest."""
    if len(points) <= 2 * BUCKETS:
        return points
    size = math.ceil(len(points) / BUCKETS)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    kept = {extreme(bucket, key=lambda point: point[1]) for bucket in buckets for extreme in (min, max)}
    return sorted(kept | {points[0], points[-1]})


def _moving_average(points: Points) -> Points:
    """Of the values around, at one point of every bucket; a short run has none."""
    reach = len(points) // SMOOTHING // 2
    if reach < 2:
        return []
    places = sorted({*range(0, len(points), math.ceil(len(points) / BUCKETS)), len(points) - 1})
    around = [points[max(0, place - reach) : place + reach + 1] for place in places]
    return [(points[p][0], fmean(value for _, value in part)) for p, part in zip(places, around, strict=True)]


def _ticks(low: float, high: float, most: int, least: float = 0) -> list[tuple[float, str]]:
    """(value, text) of the round numbers from `low` to `high`, about `most` of them, `least` apart."""
    size = 10.0 ** math.floor(math.log10(max(high - low, 1e-290) / most))
    step = max(least, next(size * one for one in (1, 2, 5, 10) if size * one * most >= high - low))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    style = f",.{decimals}f" if decimals <= 4 and max(abs(low), abs(high)) < 1e6 else ".3g"
    places = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(place * step, format(place * step, style)) for place in places]


def _text(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
