"""Curves of a run as inline SVG. Colours are CSS variables, so that a page's light or dark theme holds."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from grpo_fast.run_record.summary import PHASES

Records = Sequence[Mapping[str, Any]]

SIZE = (4.2, 2.1)  # inches at 72 dpi: the SVG scales
SMOOTHING = 20  # the bold line averages a twentieth of the run
# matplotlib writes plain colours: these stand for the page's variables and are replaced in the SVG.
INK, GRID = "#010101", "#020202"
SERIES = ("#030303", "#040404", "#050505", "#060606", "#070707", "#080808")
VARIABLES = {INK: "var(--muted)", GRID: "var(--line)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, start=1)
}


@dataclass(frozen=True)
class Chart:
    """A drawn chart and what stands beside it."""

    title: str
    svg: str  # trusted markup, made here from numbers and fixed labels
    legend: tuple[str, ...] = ()  # the n-th has the n-th series' colour


@dataclass(frozen=True)
class Curve:
    """Metrics that share a chart, each with its label."""

    title: str
    names: Mapping[str, str]  # metric -> label
    scale: float = 1.0
    stacked: bool = False


METRIC_CURVES = (
    Curve("KL to the reference", {"kl": "KL"}),
    Curve("Clipped tokens, %", {"clip_ratio/region_mean": "clipped"}, scale=100),
    Curve("Entropy", {"entropy": "entropy"}),
    Curve("Completion length, tokens", {"completion/length_mean": "length"}),
    Curve("Truncated completions, %", {"completion/truncated": "truncated"}, scale=100),
    Curve("Groups without spread, %", {"groups/flat": "flat"}, scale=100),
    Curve("Loss", {"loss": "loss"}),
    Curve("Gradient norm", {"grad_norm": "norm"}),
    Curve("Learning rate", {"learning_rate": "rate"}),
    Curve("Sampler against trainer, |Δ log p|", {"sampling/logp_difference_mean": "mean"}),
)
TIMING_CURVES = (
    Curve("Tokens per second", {"tokens_per_second": "tokens/s"}),
    Curve("Seconds by phase", {f"time/{phase}": phase for phase in PHASES}, stacked=True),
    Curve("Peak memory, GiB", {"memory/peak_bytes": "memory"}, scale=2**-30),
)


def draw_curves(metrics: Records, timings: Records, evaluations: Records) -> list[Chart]:
    """Every chart that the records have numbers for.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    names = dict.fromkeys(name for record in metrics for name in record)
    parts = {name: name.split("/")[1] for name in names if re.fullmatch(r"reward/[^/]+/mean", name)}
    charts = [
        _evaluation_chart(evaluations),
        _reward_chart(metrics),
        _curve_chart(Curve("Reward by function", parts), metrics) if len(parts) > 1 else None,
        *(_curve_chart(curve, metrics) for curve in METRIC_CURVES),
        *(_curve_chart(curve, timings) for curve in TIMING_CURVES),
    ]
    return [chart for chart in charts if chart is not None]


def _evaluation_chart(evaluations: Records) -> Chart | None:
    """Held-out scores in per cent, with their intervals."""
    if not evaluations:
        return None
    names = list(dict.fromkeys(record["name"] for record in evaluations))
    figure, axes = _figure()
    for name, colour in zip(names, SERIES, strict=False):
        records = [r for r in evaluations if r["name"] == name]
        steps, scores = [r["step"] for r in records], [100 * r["score"] for r in records]
        axes.plot(steps, scores, color=colour, marker="o", markersize=3.5, linewidth=1.6)
        for record in records:
            if None not in record["interval"]:
                low, high = (100 * bound for bound in record["interval"])
                axes.vlines(record["step"], low, high, color=colour, linewidth=1.2, alpha=0.6)
    return _chart("Held-out score, %", figure, names)


def _reward_chart(metrics: Records) -> Chart | None:
    """Mean reward of each step, its smoothed course, and the spread of the step's completions."""
    steps, means = _series(metrics, "reward/mean")
    if not steps:
        return None
    figure, axes = _figure()
    spread_steps, spread = _series([r for r in metrics if r.get("reward/mean") is not None], "reward/std")
    if spread_steps == steps:
        low = [mean - std for mean, std in zip(means, spread, strict=True)]
        high = [mean + std for mean, std in zip(means, spread, strict=True)]
        axes.fill_between(steps, low, high, color=SERIES[0], alpha=0.1, linewidth=0)
    _line(axes, steps, means, SERIES[0])
    return _chart("Reward, mean ± standard deviation", figure, [])


def _curve_chart(curve: Curve, records: Records) -> Chart | None:
    drawn = {
        label: (steps, [curve.scale * value for value in values])
        for name, label in curve.names.items()
        for steps, values in [_series(records, name)]
        if steps
    }
    if not drawn:
        return None
    figure, axes = _figure()
    if curve.stacked:
        _stack(axes, list(drawn.values()))
    else:
        for (steps, values), colour in zip(drawn.values(), SERIES, strict=False):
            _line(axes, steps, values, colour)
    return _chart(curve.title, figure, list(drawn))


def _chart(title: str, figure: Figure, labels: Sequence[str]) -> Chart:
    """With a legend for several series; the title says so when there are more of them than colours."""
    more = f" (first {len(SERIES)} of {len(labels)})" if len(labels) > len(SERIES) else ""
    return Chart(title + more, to_svg(figure, title), tuple(labels[: len(SERIES)]) if len(labels) > 1 else ())


def _line(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str) -> None:
    """The values, faint, under their moving average; a short run's values alone."""
    window = len(values) // SMOOTHING
    if window < 3:
        axes.plot(steps, values, color=colour, linewidth=1.4)
        return
    axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(steps, _moving_average(values, window), color=colour, linewidth=1.8)


def _stack(axes: Axes, drawn: Sequence[tuple[list[int], list[float]]]) -> None:
    """Areas on top of each other; a phase that a step did without took no time."""
    steps = sorted({step for series_steps, _ in drawn for step in series_steps})
    by_step = [dict(zip(*series, strict=True)) for series in drawn]
    layers = [[values.get(step, 0.0) for step in steps] for values in by_step]
    axes.stackplot(steps, layers, colors=SERIES[: len(layers)], alpha=0.75, linewidth=0)
    axes.set_ylim(bottom=0)


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values, of fewer at the start."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it has a value."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _figure() -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the report's curves need `pip install matplotlib`") from error
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=9.5, length=0, pad=4)
    axes.yaxis.get_offset_text().set_color(INK)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    return figure, axes


def to_svg(figure: Figure, name: str) -> str:
    """Markup to put into a page: text as text, colours as variables, identifiers that no other chart has."""
    import matplotlib

    target = io.StringIO()
    unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", transparent=True, metadata=unnamed)
    markup = target.getvalue()
    markup = markup[markup.index("<svg") :]
    for colour, variable in VARIABLES.items():
        markup = markup.replace(colour, variable)
    prefix = re.sub(r"\W+", "-", name)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", markup)
