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
Series = dict[int, float]
"""step -> value, where there is one."""

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


STACKED = "Seconds by phase"
# (title, factor, metric -> label)
CURVES: tuple[tuple[str, float, Mapping[str, str]], ...] = (
    ("KL to the reference", 1, {"kl": "KL"}),
    ("Clipped tokens, %", 100, {"clip_ratio/region_mean": "clipped"}),
    ("Entropy", 1, {"entropy": "entropy"}),
    ("Completion length, tokens", 1, {"completion/length_mean": "length"}),
    ("Truncated completions, %", 100, {"completion/truncated": "truncated"}),
    ("Groups without spread, %", 100, {"groups/flat": "flat"}),
    ("Loss", 1, {"loss": "loss"}),
    ("Gradient norm", 1, {"grad_norm": "norm"}),
    ("Learning rate", 1, {"learning_rate": "rate"}),
    ("Sampler against trainer, |Δ log p|", 1, {"sampling/logp_difference_mean": "mean"}),
    ("Tokens per second", 1, {"tokens_per_second": "tokens/s"}),
    (STACKED, 1, {f"time/{phase}": phase for phase in PHASES}),
    ("Peak memory, GiB", 2**-30, {"memory/peak_bytes": "memory"}),
)


def draw_curves(records: Records, evaluations: Records) -> list[Chart]:
    """Every chart that the steps' metrics and timings, and the held-out scores, have numbers for.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    charts = [_evaluation_chart(evaluations)] if evaluations else []
    means, spread = series(records, "reward/mean"), series(records, "reward/std")
    if means:
        figure, axes = _figure()
        if spread.keys() == means.keys():
            low, high = ([means[step] + sign * spread[step] for step in means] for sign in (-1, 1))
            axes.fill_between(list(means), low, high, color=SERIES[0], alpha=0.1, linewidth=0)
        _line(axes, means, SERIES[0])
        charts.append(_chart("Reward, mean ± standard deviation", figure))
    names = dict.fromkeys(name for record in records for name in record)
    rewards = {name: name.split("/")[1] for name in names if re.fullmatch(r"reward/[^/]+/mean", name)}
    by_function = [("Reward by function", 1, rewards)] if len(rewards) > 1 else []
    for title, factor, labels in (*by_function, *CURVES):
        found = {label: series(records, name) for name, label in labels.items()}
        drawn = {
            label: {step: factor * value for step, value in values.items()}
            for label, values in found.items()
            if values
        }
        if drawn:
            figure, axes = _figure()
            if title == STACKED:
                _stack(axes, list(drawn.values()))
            else:
                for values, colour in zip(drawn.values(), SERIES, strict=False):
                    _line(axes, values, colour)
            charts.append(_chart(title, figure, list(drawn)))
    return charts


def series(records: Records, name: str) -> Series:
    """A metric by step, where it has a value."""
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def _evaluation_chart(evaluations: Records) -> Chart:
    """Held-out scores in per cent, with their intervals."""
    names = list(dict.fromkeys(record["name"] for record in evaluations))
    figure, axes = _figure()
    for name, colour in zip(names, SERIES, strict=False):
        scores = {r["step"]: 100 * r["score"] for r in evaluations if r["name"] == name}
        axes.plot(*_points(scores), color=colour, marker="o", markersize=3.5, linewidth=1.6)
        for record in evaluations:
            if record["name"] == name and None not in record["interval"]:
                low, high = (100 * bound for bound in record["interval"])
                axes.vlines(record["step"], low, high, color=colour, linewidth=1.2, alpha=0.6)
    return _chart("Held-out score, %", figure, names)


def _chart(title: str, figure: Figure, labels: Sequence[str] = ()) -> Chart:
    """With a legend for several series; the title says so when there are more of them than colours."""
    more = f" (first {len(SERIES)} of {len(labels)})" if len(labels) > len(SERIES) else ""
    return Chart(title + more, to_svg(figure, title), tuple(labels[: len(SERIES)]) if len(labels) > 1 else ())


def _points(values: Series) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


def _line(axes: Axes, values: Series, colour: str) -> None:
    """The values, faint, under the mean of the last `window` of them; a short run's values alone."""
    steps, numbers = _points(values)
    window = len(numbers) // SMOOTHING
    if window < 3:
        axes.plot(steps, numbers, color=colour, linewidth=1.4)
        return
    axes.plot(steps, numbers, color=colour, linewidth=0.8, alpha=0.35)
    recent = (numbers[max(0, end - window) : end] for end in range(1, len(numbers) + 1))
    axes.plot(steps, [sum(part) / len(part) for part in recent], color=colour, linewidth=1.8)


def _stack(axes: Axes, drawn: Sequence[Series]) -> None:
    """Areas on top of each other; a phase that a step did without took no time."""
    steps = sorted({step for values in drawn for step in values})
    layers = [[values.get(step, 0.0) for step in steps] for values in drawn]
    axes.stackplot(steps, layers, colors=SERIES[: len(layers)], alpha=0.75, linewidth=0)
    axes.set_ylim(bottom=0)


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
