"""The JSON of a run: written after every cell, read back by `compare` and the reports.

Every subcommand writes one document: `schema`, `kind` (its name), `environment` (device, versions, git
revision, command), `options`, `gpu_states`, `not_measured`, `stopped` and `cells`. A cell is a `Measurement`:
one implementation at one shape. `head` alone writes a cell for a setting, with every implementation in it;
`read` gives its results as measurements too, so a reader needs one form.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .accuracy import Accuracy
from .cell import Cell, Result
from .failures import ERROR, LATE
from .failures import OOM as OUT_OF_MEMORY
from .problem import Setting
from .timing import Memory, Spread

SCHEMA = 1
HEAD = "head"
OK, SKIPPED, OOM, FAILED = "ok", "skipped", "oom", "failed"
STATUS = {OK: OK, SKIPPED: SKIPPED, OUT_OF_MEMORY: OOM, ERROR: FAILED, LATE: SKIPPED}  # of `failures`' states


@dataclass(frozen=True)
class Measurement:
    """One implementation at one shape."""

    implementation: str  # "ours", "TRL", ...; of `kernels`, the kernel
    shape: dict[str, Any]  # what was asked: sizes, dtype, model, ...; equal shapes compare
    status: str = OK  # OK, SKIPPED, OOM or FAILED
    reason: str = ""  # of any other status than OK
    seconds: list[float] = field(default_factory=list)  # of every repetition, in order, warm-up left out
    time: Spread | None = None  # of `seconds`: median and quartiles in milliseconds
    memory: Memory | None = None  # peak bytes, by torch's allocator and by the driver (a CPU: by the system)
    accuracy: dict[str, float] = field(default_factory=dict)  # errors against the oracle, by name
    phases: dict[str, float] = field(default_factory=dict)  # median seconds of each part of a repetition
    metrics: dict[str, float] = field(default_factory=dict)  # anything derived: tokens_per_second, mfu, ...
    ceilings: dict[str, float] = field(default_factory=dict)  # measured beside it, in the same run


@dataclass(frozen=True)
class Record:
    """One run of one subcommand."""

    kind: str
    cells: list[Measurement]
    environment: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    gpu_states: list[dict[str, str] | None] = field(default_factory=list)  # clocks, temperature, power
    not_measured: list[dict[str, Any]] = field(default_factory=list)  # shapes that the time did not reach
    stopped: str | None = None  # why the run ended early


def save(path: Path, cells: Sequence[Cell | Measurement], *, kind: str = HEAD, **about: Any) -> None:
    """Replaces `path` at once, so that an interruption leaves the previous state or this one."""
    document = {"schema": SCHEMA, "kind": kind, **about, "cells": [asdict(cell) for cell in cells]}
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(_finite(document), indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> tuple[list[Cell], dict[str, Any]]:
    """The cells of `head`, and everything else in the file.

    Raises:
        ValueError: not a file that `python -m benchmarks head --json` wrote.
    """
    try:
        document = _document(path)
        if document["kind"] != HEAD:
            raise ValueError(f"it is of the kind {document['kind']!r}, not {HEAD!r}")
        return [_cell(cell) for cell in document.pop("cells")], document
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def read(path: Path) -> Record:
    """A record of any kind, with the results of `head` as measurements.

    Raises:
        ValueError: not a file that `python -m benchmarks COMMAND --json` wrote.
    """
    try:
        document = _document(path)
        if document["kind"] == HEAD:
            cells = [row for cell in document["cells"] for row in measurements(_cell(cell))]
        else:
            cells = [_measurement(cell) for cell in document["cells"]]
        known = ("options", "gpu_states", "not_measured", "stopped")
        about = {name: document[name] for name in known if name in document}
        return Record(document["kind"], cells, document["environment"], **about)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def measurements(cell: Cell) -> list[Measurement]:
    """One cell of `head`, an implementation at a time."""
    ceilings = {} if cell.product is None else {"product_seconds": cell.product.median / 1e3}
    shape = asdict(cell.setting)
    return [
        Measurement(
            implementation=result.name,
            shape=shape,
            status=STATUS[result.state],
            reason=result.reason or (result.state if result.state == LATE else ""),
            seconds=list(result.seconds),
            time=result.time,
            memory=result.memory,
            accuracy=_present(result.accuracy),
            metrics=dict(result.certificate or {}),
            ceilings=ceilings,
        )
        for result in cell.results
    ]


def _document(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']}, this reads {SCHEMA}")
    return {"kind": HEAD} | document


def _cell(found: dict[str, Any]) -> Cell:
    return Cell(
        **found
        | {
            "setting": Setting(**found["setting"]),
            "product": _maybe(Spread, found["product"]),
            "results": [_result(result) for result in found["results"]],
        }
    )


def _result(found: dict[str, Any]) -> Result:
    return Result(
        **found
        | {
            "time": _maybe(Spread, found["time"]),
            "memory": _maybe(Memory, found["memory"]),
            "accuracy": _maybe(Accuracy, _numbers(found["accuracy"])),
            "seconds": tuple(found.get("seconds", ())),
        }
    )


def _measurement(found: dict[str, Any]) -> Measurement:
    numbers = {
        name: _numbers(found[name]) for name in ("accuracy", "phases", "metrics", "ceilings") if name in found
    }
    parts = {"time": _maybe(Spread, found.get("time")), "memory": _maybe(Memory, found.get("memory"))}
    return Measurement(**found | numbers | parts)


def _present(accuracy: Accuracy | None) -> dict[str, float]:
    if accuracy is None:
        return {}
    return {name: value for name, value in asdict(accuracy).items() if value is not None}


def _maybe(kind: type, found: dict[str, Any] | None) -> Any:
    return None if found is None else kind(**found)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are written as strings."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(found: dict[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: float(value) if isinstance(value, str) else value for name, value in found.items()}
