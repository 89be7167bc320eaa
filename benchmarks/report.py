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

from grpo_fast.run_record.charts import SERIES
from grpo_fast.run_record.report import page_style

from . import report_charts as charts
from .goals import TIMES
from .readme_tables import ERRORS
from .record import HEAD, SKIPPED, Measurement, Record, read
from .report_charts import Plot, Quantity, Style
from .roofline import roof_of
from .shapes import Shape, Slice, conclusions, is_wrong, label, number, shapes_of, slices, split_axes

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_PLOTS = 6  # of one sort: the longest slices, the first shapes
TITLES = {HEAD: "LM head", "kernels": "Kernels", "step": "Policy update", "rollout": "Rollout",
          "group": "Largest group", "train": "Training", "scaling": "Scaling"}  # fmt: skip
FRONTS = {"hidden_gradient": "Relative error of dX", "logprob": "Largest error of log p, nats"}
MOST_COLUMNS = 6  # of metrics that no other kind of record has
Column = Callable[[Measurement], str]
Draw = Callable[[], Plot | None]
_FIRST_AXES = ("tokens", "vocabulary", "hidden")
_RATES = {"flops_per_second": ("TFLOP/s", 1e12), "bytes_per_second": ("GB/s", 1e9)}


@dataclass(frozen=True)
class Group:
    """Plots under one heading."""

    title: str
    plots: list[Plot]
    left_out: int = 0
    legend: tuple[str, ...] = ()  # of the plots themselves, where it is not the section's


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
    tables: list[dict[str, Any]]
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
    return template.render(sections=sections, style=page_style(), colours=len(SERIES))


def _own(svg: str, number: int) -> str:
    """Two records may have the same plot; on a page an identifier may not come twice."""
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>r{number}-", svg)


def _section(path: Path, record: Record) -> Section:
    measured = [cell for cell in record.cells if cell.status != SKIPPED]
    concluded = conclusions(measured)
    drawn = _without_ceilings([cell for cell in measured if cell not in concluded] or measured)
    constant, varying = split_axes(drawn or record.cells)
    shapes = [shape for shape in shapes_of(measured) if shape not in shapes_of(concluded)]
    names = list(dict.fromkeys(cell.implementation for cell in drawn))
    styles = charts.styles_of(names)
    return Section(
        title=TITLES.get(record.kind, record.kind),
        file=path.name,
        record=record,
        facts=_facts(record),
        common=label(constant) if varying else "",
        legend=[(name, charts.swatch(styles[name], name)) for name in names],
        has_product=any("product_seconds" in cell.ceilings for cell in measured),
        groups=[group for group in _groups(record, drawn, varying, styles) if group.plots],
        tables=[_table(record, shape, list(shape)) for shape in shapes_of(concluded)]
        + [_table(record, shape, varying) for shape in shapes],
        skipped=_skipped(record.cells),
        provenance=_provenance(record),
    )


def _without_ceilings(cells: Sequence[Measurement]) -> list[Measurement]:
    """Where the ceilings are measurements too, they bound the others instead of standing among them."""
    bounded = [cell for cell in cells if cell.ceilings]
    return bounded or list(cells)


def _groups(
    record: Record, measured: Sequence[Measurement], varying: Sequence[str], styles: dict[str, Style]
) -> list[Group]:
    shapes = [
        ([cell for cell in measured if cell.shape == shape], label(shape, varying) or label(shape))
        for shape in shapes_of(measured)
    ]
    sizes = _sizes(measured)
    roof = roof_of(record)

    def at_shape(quantity: Quantity) -> list[Draw]:
        return [partial(charts.bars, cells, quantity, title) for cells, title in shapes]

    def against_size(quantity: Quantity) -> list[Draw]:
        return [partial(charts.lines, part, quantity, styles, label(part.fixed, varying)) for part in sizes]

    fronts: list[Draw] = [
        partial(charts.pareto, cells, error, words, styles, title)
        for cells, title in shapes
        for error, words in FRONTS.items()
    ]
    roofs: list[Draw] = [partial(charts.roofline, measured, roof, styles)] if roof else []
    return [
        _group("Largest group that fits", at_shape(charts.GROUP)),
        _group("Time at one shape", at_shape(charts.TIME)),
        _group("Throughput at one shape", at_shape(charts.TOKENS)),
        _group("Time against size", against_size(charts.TIME)),
        _group("Memory", against_size(charts.MEMORY) or at_shape(charts.MEMORY)),
        _group("Accuracy against time", fronts),
        _group("Roofline", roofs),
        *_phases(shapes),
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
    others = dict.fromkeys(name for cell in cells for name in cell.shape)
    axes = [*_FIRST_AXES, *(name for name in others if name not in _FIRST_AXES)]
    by_axis = [slices(cells, axis) for axis in axes]
    longest = max(map(len, by_axis), default=0)
    return [found[i] for i in range(longest) for found in by_axis if i < len(found)]


def _phases(shapes: Sequence[tuple[list[Measurement], str]]) -> list[Group]:
    """A plot has its own legend, so each is a group."""
    drawn = [charts.phases(cells, title) for cells, title in shapes[:MOST_PLOTS]]
    return [Group("Phases", [plot], legend=names) for plot, names in filter(None, drawn)]


def _table(record: Record, shape: Shape, varying: Sequence[str]) -> dict[str, Any]:
    """Every measurement at one shape, the fastest first, in the columns that anything stands in."""
    here = [cell for cell in record.cells if cell.shape == shape]
    cells = [cell for cell in here if cell.status != SKIPPED]
    cells.sort(key=lambda cell: (cell.time is None, 0.0 if cell.time is None else cell.time.median))
    others = list(dict.fromkeys(name for cell in cells for name in cell.metrics if name not in _RATES))
    shown = others if len(others) <= MOST_COLUMNS else []
    metrics = {name.replace("_", " "): partial(_metric, name) for name in shown}
    filled = {
        head: column for head, column in (_COLUMNS | metrics).items() if any(column(cell) for cell in cells)
    }
    return {
        "title": label(shape, varying) or label(shape),
        "open": not any(cell.time for cell in cells),
        "heads": list(filled),
        "rows": [_row(cell, list(filled.values()), {*_RATES, *shown}) for cell in cells],
        "skipped": [f"{cell.implementation}: {cell.reason}" for cell in here if cell.status == SKIPPED],
    }


def _row(cell: Measurement, columns: Sequence[Column], shown: set[str]) -> dict[str, Any]:
    return {
        "name": cell.implementation,
        "ours": cell.implementation.startswith(charts.OURS),
        "numbers": [column(cell) for column in columns],
        "state": charts.STATES.get(cell.status, ""),
        "wrong": is_wrong(cell),
        "remark": "; ".join([cell.reason] * bool(cell.reason) + _extras(cell, shown)),
    }


def _extras(cell: Measurement, shown: set[str]) -> list[str]:
    """What has no column of its own."""
    parts = [f"{name} {1e3 * seconds:.3g} ms" for name, seconds in cell.phases.items()]
    parts += [f"{name} {number(value)}" for name, value in cell.metrics.items() if name not in shown]
    parts += [f"error of {name} {value:.1e}" for name, value in cell.accuracy.items() if name not in ERRORS]
    return [part.replace("_", " ") for part in parts]


def _quartiles(cell: Measurement) -> str:
    return "" if cell.time is None else f"{number(cell.time.lower)} … {number(cell.time.upper)}"


def _multiple(cell: Measurement) -> str:
    seconds = cell.ceilings.get("product_seconds")
    return "" if cell.time is None or not seconds else f"{cell.time.median / seconds / 1e3:.2f}"


def _metric(name: str, cell: Measurement) -> str:
    unit = _RATES[name][1] if name in _RATES else 1.0
    return number(cell.metrics[name] / unit) if name in cell.metrics else ""


def _mebibytes(part: str, cell: Measurement) -> str:
    count = None if cell.memory is None else getattr(cell.memory, part)
    return "" if count is None else f"{count / 2**20:,.0f}"


def _error(name: str, cell: Measurement) -> str:
    return f"{cell.accuracy[name]:.1e}" if name in cell.accuracy else ""


_COLUMNS: dict[str, Column] = {
    "ms": lambda cell: "" if cell.time is None else number(cell.time.median),
    "quartiles": _quartiles,
    "samples": lambda cell: "" if cell.time is None else str(cell.time.samples),
    f"{TIMES} X Wᵀ": _multiple,
    **{unit: partial(_metric, name) for name, (unit, _) in _RATES.items()},
    **{f"{part} MiB": partial(_mebibytes, part) for part in ("allocator", "driver")},
    **{symbol: partial(_error, name) for name, symbol in ERRORS.items()},
}


def _skipped(cells: Sequence[Measurement]) -> list[tuple[str, str]]:
    """Implementations that were measured nowhere, each once."""
    measured = {cell.implementation for cell in cells if cell.status != SKIPPED}
    reasons = {cell.implementation: cell.reason for cell in cells if cell.status == SKIPPED}
    return [(name, reason) for name, reason in reasons.items() if name not in measured]


def _facts(record: Record) -> dict[str, str]:
    found = record.environment
    facts = {
        "Device": found.get("benchmark_device"),
        "torch": found.get("versions", {}).get("torch"),
        "Copy bandwidth": _gigabytes(found.get("copy_gigabytes_per_second")),
        "Measured": str(found.get("started", ""))[:10],
        "Revision": _revision(found.get("git")),
    }
    return {name: value for name, value in facts.items() if value}


def _gigabytes(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f} GB/s"


def _revision(git: dict[str, Any] | None) -> str | None:
    return None if git is None else git["revision"][:10] + (" with changes" if git["changed"] else "")


def _provenance(record: Record) -> dict[str, str]:
    """Everything needed to judge the run or to repeat it."""
    found = record.environment
    states = [state for state in record.gpu_states if state]
    clocks = "; ".join(
        ", ".join(f"{k} {v}" for k, v in state.items()) for state in (*states[:1], *states[-1:])
    )
    rows = {
        "Repeat": shlex.join(found.get("command", [])),
        "Started": found.get("started"),
        "Device": f"{found.get('benchmark_device')} ({found.get('device')})",
        "System": f"{found.get('system')}, Python {found.get('python')}, CUDA {found.get('cuda') or 'none'}",
        "Packages": ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items()),
        "Revision": (found.get("git") or {}).get("revision"),
        "First and last clocks": clocks,
        "Options": json.dumps(record.options, ensure_ascii=False),
        "Stopped": record.stopped,
    }
    return {name: str(value) for name, value in rows.items() if value}
