"""`python -m benchmarks report A.json [B.json …] --html OUT.html`: records as one page, readable offline."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from grpo_fast.run_record.report import packaged

from . import charts
from .charts import Plot, Quantity, Slice
from .measure import SKIPPED
from .record import Measurement, Record, read
from .tables import EXPLANATION, conclusions, label, shape_tables, shapes_of, skipped, split_axes

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_PLOTS = 6  # of one sort: the longest slices, the first shapes
TITLES = {"head": "LM head", "kernels": "Kernels", "step": "Policy update", "rollout": "Rollout",
          "group": "Largest group", "train": "Training", "scaling": "Scaling"}  # fmt: skip
FRONTS = {"hidden_gradient": "Relative error of dX", "logprob": "Largest error of log p, nats"}
_FIRST_AXES = ("tokens", "vocabulary", "hidden")
Plots = Iterator[Plot | None]


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
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [_section(path, record) for path, record in records]
    return template.render(sections=sections, style=packaged("report.css"), explanation=EXPLANATION)


def _section(path: Path, record: Record) -> dict[str, Any]:
    """One record, as the template takes it."""
    measured = [cell for cell in record.cells if cell.status != SKIPPED]
    concluded = conclusions(measured)
    drawn = [cell for cell in measured if cell not in concluded] or measured
    # Where the ceilings are measurements too, they bound the others instead of standing among them.
    drawn = [cell for cell in drawn if cell.ceilings] or drawn
    constant, varying = split_axes(drawn or record.cells)
    styles = charts.styles_of(list(dict.fromkeys(cell.implementation for cell in drawn)))
    everywhere = {cell.implementation for cell in measured}
    others = [cell for cell in measured if cell.shape not in shapes_of(concluded)]
    return {
        "title": TITLES.get(record.kind, record.kind),
        "record": record,
        "file": path.name,
        "common": label(constant) if varying else "",
        "legend": {name: charts.swatch(style) for name, style in styles.items()},
        "has_product": any("product_seconds" in cell.ceilings for cell in measured),
        "groups": [_first(title, plots) for title, plots in _plots(record, drawn, varying, styles).items()],
        "tables": shape_tables(concluded) + shape_tables(others, varying),
        "skipped": [(name, reason) for name, reason in skipped(record.cells) if name not in everywhere],
        "provenance": dict(_provenance(record)),
    }


def _plots(
    record: Record, cells: Sequence[Measurement], varying: Sequence[str], styles: dict[str, charts.Style]
) -> dict[str, Plots]:
    """By heading, each drawn when its turn comes."""
    shapes = [
        ([cell for cell in cells if cell.shape == shape], label(shape, varying) or label(shape))
        for shape in shapes_of(cells)
    ]
    sizes = [(part, label(part.fixed, varying)) for part in _sizes(cells)]
    copy_rate = 1e9 * record.environment.get("copy_gigabytes_per_second", 0.0)

    def bars(quantity: Quantity) -> Plots:
        return (charts.bars(found, quantity, title) for found, title in shapes)

    def lines(quantity: Quantity) -> Plots:
        return (charts.lines(part, quantity, styles, title) for part, title in sizes)

    return {
        "Largest group that fits": bars(charts.GROUP),
        "Time at one shape": bars(charts.TIME),
        "Throughput at one shape": bars(charts.THROUGHPUT),
        "Time against size": lines(charts.TIME),
        "Memory": lines(charts.MEMORY) if sizes else bars(charts.MEMORY),
        "Accuracy against time": (
            charts.pareto(found, error, words, styles, title)
            for found, title in shapes
            for error, words in FRONTS.items()
        ),
        "Roofline": iter([charts.roofline(cells, copy_rate, styles)]),
        "Phases": (charts.phases(found, title) for found, title in shapes),
    }


def _first(title: str, drawn: Plots) -> dict[str, Any]:
    """The first plots that have something to show."""
    plots = list(islice((plot for plot in drawn if plot is not None), MOST_PLOTS + 1))
    return {"title": title, "plots": plots[:MOST_PLOTS], "more": len(plots) > MOST_PLOTS}


def _sizes(cells: Sequence[Measurement]) -> list[Slice]:
    """An axis after the other, the longest slice of each first, so that none is crowded out."""
    axes = dict.fromkeys([*_FIRST_AXES, *(name for cell in cells for name in cell.shape)])
    by_axis = [charts.slices(cells, axis) for axis in axes]
    return [part for part in chain.from_iterable(zip_longest(*by_axis)) if part is not None]


def _provenance(record: Record) -> Iterator[tuple[str, str]]:
    """Everything needed to judge the run or to repeat it."""
    found = dict(record.environment)
    states = [state for state in record.gpu_states if state]
    found |= {
        "command": shlex.join(found.get("command", [])),
        "first and last clocks": [*states[:1], *states[-1:]],
        "rows": record.notes,
        "options": record.options,
        "stopped": record.stopped,
    }
    for name, value in found.items():
        if value:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield name.replace("_", " ").capitalize(), text
