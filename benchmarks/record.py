"""The JSON of a run: written after every shape, read back by `compare` and the reports.

Every subcommand writes one document: `schema`, `kind` (its name), `environment` (device, versions, git
revision, command), `options`, `gpu_states`, `notes`, `not_measured`, `stopped`, `culprit` and `cells`. A cell
is a `Measurement`: one implementation at one shape.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .measure import OK, Memory, Spread

SCHEMA = 1


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

    @property
    def peak_bytes(self) -> int | None:
        return None if self.memory is None else self.memory.best


@dataclass(frozen=True)
class Record:
    """One run of one subcommand."""

    kind: str
    cells: list[Measurement]
    environment: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    gpu_states: list[dict[str, str] | None] = field(default_factory=list)  # clocks, temperature, power
    notes: list[str] = field(default_factory=list)  # what shapes do not say, such as where rows come from
    not_measured: list[dict[str, Any]] = field(default_factory=list)  # shapes that the time did not reach
    stopped: str | None = None  # why the run ended early
    culprit: str | None = None  # the implementation that broke the device


def save(path: Path, record: Record) -> None:
    write_json(path, {"schema": SCHEMA, **asdict(record)})


def write_json(path: Path, document: Any) -> None:
    """Replaces `path` at once, so that an interruption leaves the previous state or this one."""
    temporary = path.with_name(path.name + ".part")
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path) -> Record:
    """
    Raises:
        ValueError: not a file that `python -m benchmarks COMMAND --json` wrote.
    """
    try:
        document = json.loads(path.read_text())
        if document.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return Record(**document | {"cells": [_measurement(cell) for cell in document["cells"]]})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def _measurement(found: dict[str, Any]) -> Measurement:
    """Of JSON, in which numbers that are not finite are strings."""
    numbers = {
        name: {key: float(value) if isinstance(value, str) else value for key, value in found[name].items()}
        for name in ("accuracy", "phases", "metrics", "ceilings")
        if name in found
    }
    kinds = {"time": Spread, "memory": Memory}
    parts = {name: kind(**found[name]) for name, kind in kinds.items() if found.get(name) is not None}
    return Measurement(**found | numbers | parts)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are written as strings."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
