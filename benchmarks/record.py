"""The JSON of a run: written after every shape, read back by `compare` and the reports.

Every subcommand writes one document: `schema`, `kind` (its name), `environment` (device, versions, git
revision, command), `options`, `gpu_states`, `notes`, `not_measured`, `stopped`, `culprit` and `cells`. A cell
is a `Measurement`: one implementation at one shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic_core import to_json

from grpo_fast.record.files import write_whole

from .measure import OK, Memory, Spread


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


@dataclass
class Record:
    """One run of one subcommand, as far as it has come."""

    kind: str
    cells: list[Measurement]
    environment: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    gpu_states: list[dict[str, str] | None] = field(default_factory=list)  # clocks, temperature, power
    notes: list[str] = field(default_factory=list)  # what shapes do not say, such as where rows come from
    not_measured: list[dict[str, Any]] = field(default_factory=list)  # shapes that the time did not reach
    stopped: str | None = None  # why the run ended early
    culprit: str | None = None  # the implementation that broke the device
    schema: Literal[1] = 1


def write_json(path: Path | None, document: Any) -> None:
    """Replaces `path` at once, so that an interruption leaves the previous state or this one.

    Nothing is written to None. Dataclasses and paths are written as JSON has them; NaN and infinity, which it
    has not, as strings.
    """
    if path is not None:
        write_whole(path, to_json(document, indent=1, inf_nan_mode="strings") + b"\n")


def read(path: Path) -> Record:
    """
    Raises:
        ValueError: not a file that `python -m benchmarks COMMAND --json` wrote.
    """
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error
