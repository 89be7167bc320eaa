"""The JSON record of one run, with one `Measurement` for each implementation at each shape."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from pydantic_core import to_json

from grpo_fast.record.files import write_whole
from grpo_fast.record.logs import provenance

from .measure import OK

PEER_PACKAGES = ("trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels", "unsloth-zoo")


@dataclass
class Measurement:
    """One implementation at one shape."""

    implementation: str  # "ours", "TRL", ...; of `kernels`, the kernel
    shape: dict[str, Any]  # what was asked: sizes, dtype, model, ...
    status: str = OK  # OK, SKIPPED, OOM or FAILED
    reason: str = ""  # of any other status than OK
    seconds: list[float] = field(default_factory=list)  # of each repetition after the warm-up
    peak_bytes: int | None = None  # beyond the inputs, results included
    accuracy: dict[str, float] = field(default_factory=dict)  # errors against the oracle, by name
    phases: dict[str, float] = field(default_factory=dict)  # median seconds of each part of a repetition
    metrics: dict[str, float] = field(default_factory=dict)  # anything else, such as tokens_per_second

    @property
    def median(self) -> float | None:
        """Seconds of a repetition; None where none was timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> list[float]:
        """First and third, in seconds; nothing for fewer than two repetitions."""
        if len(self.seconds) < 2:
            return []
        return statistics.quantiles(self.seconds, n=4, method="inclusive")[::2]


@dataclass
class Record:
    """One run of one subcommand, as far as it has come."""

    kind: str  # the subcommand
    environment: dict[str, Any]  # device, versions, git revision, command
    options: dict[str, Any] = field(default_factory=dict)
    cells: list[Measurement] = field(default_factory=list)
    not_measured: list[dict[str, Any]] = field(default_factory=list)  # shapes that the time did not reach
    stopped: str | None = None  # why the run ended early
    schema: Literal[2] = 2


def write_json(path: Path | None, document: Any) -> None:
    """Replace `path` atomically; write nothing to None. NaN and infinity become strings."""
    if path is not None:
        write_whole(path, to_json(document, indent=1, inf_nan_mode="strings") + b"\n")


def read(path: Path) -> Record:
    """Read what a subcommand wrote with `--json`.

    Raises:
        ValueError: the file is no such record.
    """
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no benchmark record: {error}") from error


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Return everything needed to judge or repeat a run of this command."""
    found = provenance()
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    found["versions"] |= {name: installed[name] for name in PEER_PACKAGES if name in installed}
    words = [word for before, word in pairwise(["", *command]) if "--json" not in (before, word)]
    found |= {"command": ["python", "-m", "benchmarks", *words], "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # an installed package has no revision
        found["revision"] = subprocess.check_output(describe, text=True, stderr=subprocess.DEVNULL).strip()
    return found
