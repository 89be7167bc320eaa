"""Markdown tables of the checked-in records, one kind of record after the other."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.run_record.summary import duration_text, score_text

from .record import FAILED, OOM, SKIPPED, Measurement, read
from .shapes import conclusions, is_wrong, label, number, shapes_of, split_axes

ERRORS = {"logprob": "|Δlogp|", "loss": "|Δloss|", "hidden_gradient": "dX", "weight_gradient": "dW"}
NONE = "\N{EN DASH}"
_STATES = {OOM: "OOM", FAILED: "failed"}


def render(path: Path) -> str:
    """The table of one file of `benchmarks/results`, with the line that says where it comes from.

    Raises:
        ValueError: the file is missing, or of no kind that has a table.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a record: {error}") from error
    for fits, table in _KINDS:
        if fits(found):
            return "\n".join(table(found, path))
    raise ValueError(f"{path} is of no kind that has a table: it holds {_keys(found)}")


def _keys(found: Any) -> str:
    return ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__


def _record(found: dict[str, Any], path: Path) -> list[str]:
    """Implementations down, shapes across: median times, worst errors, largest memory."""
    record = read(path)
    concluded = conclusions(record.cells)
    cells = [cell for cell in record.cells if cell not in concluded] or record.cells
    constant, varying = split_axes(cells)
    shapes = shapes_of(cells)
    there = [cell for cell in cells if cell.status != SKIPPED]
    errors = [name for name in ERRORS if any(name in cell.accuracy for cell in there)]
    memory = any(_bytes(cell) is not None for cell in there)
    value, unit = (_largest, "largest group") if record.kind == "group" else (_time, "ms")
    heads = [", ".join(filter(None, (label(shape, varying), unit))) for shape in shapes]
    heads += [f"worst {ERRORS[name]}" for name in errors] + ["most extra MiB"] * memory
    lines = _head(["implementation", *heads])
    lines += _products(there, shapes, len(errors) + memory)
    for name in sorted({cell.implementation: None for cell in there}, key=_speed(there, shapes)):
        mine = [cell for cell in there if cell.implementation == name]
        row = [value(next((cell for cell in mine if cell.shape == shape), None)) for shape in shapes]
        row += [_worst(cell.accuracy.get(error) for cell in mine) for error in errors]
        row += [_mebibytes(mine)] * memory
        lines.append(_row([f"**{name}**" if name.startswith("ours") else name, *row]))
    origin = _origin(path, record.environment, record.gpu_states, label(constant))
    return [*lines, "", *_concluded(concluded), *_skipped(record.cells), origin]


def _concluded(cells: Sequence[Measurement]) -> list[str]:
    """A table of its own for what follows from the measurements."""
    if not cells:
        return []
    names = list(dict.fromkeys(name for cell in cells for name in cell.metrics))
    lines = _head(["implementation", "of", *(name.replace("_", " ") for name in names)])
    for cell in cells:
        metrics = [number(cell.metrics[name]) if name in cell.metrics else NONE for name in names]
        lines.append(_row([cell.implementation, label(cell.shape), *metrics]))
    return [*lines, ""]


def _products(cells: Sequence[Measurement], shapes: Sequence[dict], others: int) -> list[str]:
    """The ceiling of the head, where it was measured."""
    known = {repr(cell.shape): cell.ceilings.get("product_seconds") for cell in cells}
    seconds = [known.get(repr(shape)) for shape in shapes]
    if not any(seconds):
        return []
    return [
        _row(["*one product X Wᵀ*", *(_digits(1e3 * x) if x else NONE for x in seconds), *[NONE] * others])
    ]


def _speed(cells: Sequence[Measurement], shapes: Sequence[dict]) -> Callable[[str], list[float]]:
    """Sorts by the time at the first shape, then the second, ...; what has none comes last."""
    times = {(cell.implementation, repr(cell.shape)): cell.time.median for cell in cells if cell.time}
    return lambda name: [times.get((name, repr(shape)), math.inf) for shape in shapes]


def _time(cell: Measurement | None) -> str:
    if cell is None:
        return NONE
    if cell.time is None:
        return _STATES.get(cell.status, NONE)
    return f"{_digits(cell.time.median)}{' **wrong**' if is_wrong(cell) else ''}"


def _largest(cell: Measurement | None) -> str:
    size = None if cell is None else cell.metrics.get("largest_group")
    return _time(cell) if size is None else f"{size:,.0f}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _worst(errors: Any) -> str:
    """NaN is the worst."""
    found = [error for error in errors if error is not None]
    return f"{max(found, key=lambda error: math.inf if math.isnan(error) else error):.1e}" if found else NONE


def _bytes(cell: Measurement) -> int | None:
    memory = cell.memory
    return None if memory is None else memory.allocator if memory.allocator is not None else memory.driver


def _mebibytes(cells: Sequence[Measurement]) -> str:
    found = [count for cell in cells if (count := _bytes(cell)) is not None]
    return f"{max(found) / 2**20:,.0f}" if found else NONE


def _skipped(cells: Sequence[Measurement]) -> list[str]:
    """What was measured nowhere, by reason."""
    measured = {cell.implementation for cell in cells if cell.status != SKIPPED}
    reasons: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.implementation not in measured:
            reasons.setdefault(cell.reason, {})[cell.implementation] = None
    left_out = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return [f"Not measured: {'; '.join(left_out)}.", ""] if left_out else []


def _origin(path: Path, found: dict[str, Any], states: Sequence[dict[str, str] | None], common: str) -> str:
    """Where the numbers above were made, and how to make them again."""
    driver = next((f"driver {state['driver_version']}" for state in states if state), None)
    device, torch = found["benchmark_device"], f"torch {found['versions']['torch']}"
    command = f"repeat: `{shlex.join(found['command'])}`"
    facts = [common, device, driver, torch, found["started"][:10], command, _link(path)]
    return " · ".join(fact for fact in facts if fact)


def _link(path: Path) -> str:
    return f"[record](benchmarks/results/{path.name})"


def _quickstart(found: dict[str, Any], path: Path) -> list[str]:
    lines = _head(["seed", "before", "after", "points", "training", "whole command"])
    for run in found["runs"]:
        before, after = run["before"], run["after"]
        cells = [
            str(run["seed"]),
            score_text(before["score"], before["interval"]),
            score_text(after["score"], after["interval"]),
            f"{100 * (after['score'] - before['score']):+.1f}",
            duration_text(run["seconds_training"]),
            duration_text(run["seconds_wall"]),
        ]
        lines.append(_row(cells))
    first = found["runs"][0]
    origin = first["provenance"]
    command = f"repeat: `{shlex.join(['python', '-m', 'benchmarks.quickstart', *found['overrides']])}`"
    facts = [
        f"{first['after']['n']} held-out questions, 95 % intervals",
        origin["device"],
        f"torch {origin['versions']['torch']}",
        origin["started"][:10],
        command,
        _link(path),
    ]
    return [*lines, "", " · ".join(facts)]


def _side_by_side(found: dict[str, Any], path: Path) -> list[str]:
    """The worst of loss, gradient norm and metrics over all losses and steps, by precision and variant."""
    lines = _head(["variant", "precision", "runs", "steps compared", "loss", "grad norm", "any metric"])
    for precision in dict.fromkeys(cell["precision"] for cell in found["cells"]):
        cells = [cell for cell in found["cells"] if cell["precision"] == precision]
        for name in (name for name in cells[0]["variants"] if name != "TRL"):
            mine = [cell["variants"][name] for cell in cells]
            gaps = [run["differences"] for run in mine if run["differences"]]
            others = [gap[metric] for gap in gaps for metric in gap if metric not in ("loss", "grad_norm")]
            compared, steps = (sum(run["steps_compared"] for run in mine), sum(c["steps"] for c in cells))
            worst = [_worst(gap["loss"] for gap in gaps), _worst(gap["grad_norm"] for gap in gaps)]
            counts = [str(len(mine)), f"{compared} of {steps}"]
            lines.append(_row([name, precision, *counts, *worst, _worst(others)]))
    return [*lines, "", _origin(path, found["environment"], (), f"model {found['model']}")]


def _ahead_of_time(found: list[dict[str, Any]], path: Path) -> list[str]:
    """Each kernel with the most that any of its variants takes."""
    lines = _head(["kernel", "variants", "registers", "spills", "shared memory, bytes", "tensor cores"])
    for name in sorted({row["kernel"]: None for row in found}):
        rows = [row for row in found if row["kernel"] == name]
        dots = [row for row in rows if row["dots"]]
        cores = "no dot" if not dots else "yes" if all(row["tensor_core"] for row in dots) else "**missing**"
        most = [f"{max(row[key] for row in rows):,}" for key in ("registers", "spills", "shared")]
        lines.append(_row([f"`{name}`", str(len(rows)), *most, cores]))
    target = " and ".join(f"sm_{capability}" for capability in sorted({row["capability"] for row in found}))
    return [*lines, "", f"Compiled for {target}, nothing was run · repeat: `{_aot(found)}` · {_link(path)}"]


def _aot(found: Sequence[dict[str, Any]]) -> str:
    return f"python -m benchmarks aot --capability {found[0]['capability']} --json"


def _peer_suites(found: dict[str, Any], path: Path) -> list[str]:
    """The peers' own tests on our functions: how many passed, and what was left out and why."""
    lines = _head(["tests of", "revision", "passed", "failed", "skipped by themselves", "left out"])
    for name, suite in found["suites"].items():
        left_out = "; ".join(f"{count:,} {why}" for why, count in suite["reasons"]["deselected"].items())
        counts = [f"{suite[key]:,}" for key in ("passed", "failed", "skipped")]
        lines.append(_row([name, suite["commit"][:8], *counts, left_out or NONE]))
    origin = found["environment"]
    command = "repeat: `python -m benchmarks.peer_suites --source DIR`"
    facts = [origin["device"], f"torch {origin['versions']['torch']}", origin["started"][:10], command]
    return [*lines, "", " · ".join([*facts, _link(path)])]


def _tolerance_training(found: dict[str, Any], path: Path) -> list[str]:
    """Final rewards with the certified gradient beside those with exact ones."""
    lines = _head(["gradient of the head", "final reward", "lowest seed", "highest seed"])
    for name, reward in found["summary"].items():
        numbers = [reward["mean"], reward["low"], reward["high"]]
        lines.append(_row([name, *(f"{number:.3f}" for number in numbers)]))
    origin = found["environment"]
    size = f"a toy with {found['vocabulary']:,} words, {found['steps']} steps"
    facts = [size, origin["device"], f"torch {origin['versions']['torch']}", origin["started"][:10]]
    return [*lines, "", " · ".join([*facts, f"repeat: `{shlex.join(origin['command'])}`", _link(path)])]


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), "|---|" + "---:|" * (len(names) - 1)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Path], list[str]]], ...] = (
    (lambda found: isinstance(found, dict) and "schema" in found, _record),
    (lambda found: isinstance(found, dict) and "recipe" in found, _quickstart),
    (lambda found: isinstance(found, dict) and {"model", "cells"} <= found.keys(), _side_by_side),
    (lambda found: isinstance(found, dict) and "suites" in found, _peer_suites),
    (
        lambda found: isinstance(found, dict) and {"summary", "vocabulary"} <= found.keys(),
        _tolerance_training,
    ),
    (lambda found: isinstance(found, list) and bool(found) and "kernel" in found[0], _ahead_of_time),
)
