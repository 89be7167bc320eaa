"""`python -m benchmarks report A.json [B.json …] --html OUT.html`: records as one page, readable offline."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_fast.run_record.report import page_style

from . import charts
from .charts import Plot, Quantity, Slice, slices
from .measure import SKIPPED
from .record import Measurement, Record, read
from .tables import (
    EXPLANATION,
    ShapeTable,
    conclusions,
    label,
    shape_tables,
    shapes_of,
    skipped,
    split_axes,
)

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_PLOTS = 6  # of one sort: the longest slices, the first shapes
TITLES = {"head": "LM head", "kernels": "Kernels", "step": "Policy update", "rollout": "Rollout",
          "group": "Largest group", "train": "Training", "scaling": "Scaling"}  # fmt: skip
FRONTS = {"hidden_gradient": "Relative error of dX", "logprob": "Largest error of log p, nats"}
_FIRST_AXES = ("tokens", "vocabulary", "hidden")
Draw = Callable[[], Plot | None]


@dataclass(frozen=True)
class Group:
    """Plots under one heading."""

    title: str
    plots: list[Plot]
    left_out: int


@dataclass(frozen=True)
class Section:
    """One record, ready to be written down."""

    title: str
    file: str
    record: Record
    facts: dict[str, str]
    common: str  # what all shapes agree on
    legend: list[tuple[str, str]]  # name, swatch
    has_product: bool
    groups: list[Group]
    tables: list[ShapeTable]
    skipped: list[tuple[str, str]]  # implementation, reason
    provenance: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD.json")
    parser.add_argument("--html", type=Path, required=True, metavar="OUT")


def main(options: argparse.Namespace) -> int:
    """
    Raises:
        ValueError: a file that is no record, or a folder that does not exist.
        ModuleNotFoundError: matplotlib or jinja2 is missing.
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
    environment.filters["own"] = _own
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [_section(path, record) for path, record in records]
    return template.render(sections=sections, style=page_style(), explanation=EXPLANATION)


def _own(svg: str, number: int) -> str:
    """Two records may have the same plot; on a page an identifier may not come twice."""
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>r{number}-", svg)


def _section(path: Path, record: Record) -> Section:
    measured = [cell for cell in record.cells if cell.status != SKIPPED]
    concluded = conclusions(measured)
    drawn = [cell for cell in measured if cell not in concluded] or measured
    # Where the ceilings are measurements too, they bound the others instead of standing among them.
    drawn = [cell for cell in drawn if cell.ceilings] or drawn
    constant, varying = split_axes(drawn or record.cells)
    names = list(dict.fromkeys(cell.implementation for cell in drawn))
    styles = charts.styles_of(names)
    everywhere = {cell.implementation for cell in measured}
    others = [cell for cell in measured if cell.shape not in shapes_of(concluded)]
    return Section(
        title=TITLES.get(record.kind, record.kind),
        file=path.name,
        record=record,
        facts=_facts(record),
        common=label(constant) if varying else "",
        legend=[(name, charts.swatch(styles[name], name)) for name in names],
        has_product=any("product_seconds" in cell.ceilings for cell in measured),
        groups=[group for group in _groups(record, drawn, varying) if group.plots],
        tables=shape_tables(concluded) + shape_tables(others, varying),
        skipped=[(name, reason) for name, reason in skipped(record.cells) if name not in everywhere],
        provenance=_provenance(record),
    )


def _groups(record: Record, cells: Sequence[Measurement], varying: Sequence[str]) -> list[Group]:
    styles = charts.styles_of(list(dict.fromkeys(cell.implementation for cell in cells)))
    shapes = [
        ([cell for cell in cells if cell.shape == shape], label(shape, varying) or label(shape))
        for shape in shapes_of(cells)
    ]
    sizes = _sizes(cells)
    copy_rate = 1e9 * record.environment.get("copy_gigabytes_per_second", 0.0)

    def at_shape(quantity: Quantity) -> list[Draw]:
        return [partial(charts.bars, found, quantity, title) for found, title in shapes]

    def against_size(quantity: Quantity) -> list[Draw]:
        return [partial(charts.lines, part, quantity, styles, label(part.fixed, varying)) for part in sizes]

    fronts = [
        partial(charts.pareto, found, error, words, styles, title)
        for found, title in shapes
        for error, words in FRONTS.items()
    ]
    return [
        _group("Largest group that fits", at_shape(charts.GROUP)),
        _group("Time at one shape", at_shape(charts.TIME)),
        _group("Throughput at one shape", at_shape(charts.THROUGHPUT)),
        _group("Time against size", against_size(charts.TIME)),
        _group("Memory", against_size(charts.MEMORY) or at_shape(charts.MEMORY)),
        _group("Accuracy against time", fronts),
        _group("Roofline", [partial(charts.roofline, cells, copy_rate, styles)]),
        _group("Phases", [partial(charts.phases, found, title) for found, title in shapes]),
    ]


def _group(title: str, draws: Sequence[Draw]) -> Group:
    """The first plots that have something to show; the rest is not even drawn."""
    plots: list[Plot] = []
    waiting = list(draws)
    while waiting and len(plots) < MOST_PLOTS:
        plot = waiting.pop(0)()
        if plot is not None:
            plots.append(plot)
    return Group(title, plots, len(waiting))


def _sizes(cells: Sequence[Measurement]) -> list[Slice]:
    """An axis after the other, the longest slice of each first, so that none is crowded out."""
    axes = dict.fromkeys([*_FIRST_AXES, *(name for cell in cells for name in cell.shape)])
    by_axis = [slices(cells, axis) for axis in axes]
    longest = max(map(len, by_axis), default=0)
    return [found[i] for i in range(longest) for found in by_axis if i < len(found)]


def _facts(record: Record) -> dict[str, str]:
    found = record.environment
    git, copy = found.get("git"), found.get("copy_gigabytes_per_second")
    facts = {
        "Device": found.get("benchmark_device"),
        "torch": found.get("versions", {}).get("torch"),
        "Copy bandwidth": copy and f"{copy:,.0f} GB/s",
        "Measured": str(found.get("started", ""))[:10],
        "Revision": git and git["revision"][:10] + (" with changes" if git["changed"] else ""),
    }
    return {name: value for name, value in facts.items() if value}


def _provenance(record: Record) -> dict[str, str]:
    """Everything needed to judge the run or to repeat it."""
    found = record.environment
    states = [state for state in record.gpu_states if state]
    rows: dict[str, Any] = {
        "Repeat": shlex.join(found.get("command", [])),
        "Started": found.get("started"),
        "Device": f"{found.get('benchmark_device')} ({found.get('device')})",
        "System": f"{found.get('system')}, Python {found.get('python')}, CUDA {found.get('cuda') or 'none'}",
        "Packages": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items()),
        "Revision": (found.get("git") or {}).get("revision"),
        "First and last clocks": "; ".join(
            ", ".join(f"{k} {v}" for k, v in state.items()) for state in (*states[:1], *states[-1:])
        ),
        "Rows": "; ".join(record.notes),
        "Options": json.dumps(record.options, ensure_ascii=False),
        "Stopped": record.stopped,
    }
    return {name: str(value) for name, value in rows.items() if value}
