"""What a run writes down while it runs. Each file takes up where a checkpoint left it.

| file | one line is | same bytes after kill and resume |
|---|---|---|
| `metrics.jsonl` | a step's metrics | yes |
| `timings.jsonl` | a step's seconds, tokens/s, memory | no: wall-clock |
| `samples.jsonl` | a sampled completion with its rewards | yes |
| `evaluations.jsonl` | a held-out score | yes |
| `provenance.jsonl` | a start: versions, device, command | no |

NaN and infinity are written as null.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from grpo_fast.run_record.files import JsonlLog, read_jsonl
from grpo_fast.run_record.mirrors import LoggingConfig, Mirrors
from grpo_fast.run_record.summary import Interval

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
PROVENANCE_FILE = "provenance.jsonl"

NO_TIMINGS: Mapping[str, float] = MappingProxyType({})


class MetricsLog:
    """A run's metrics and timings, as JSON lines and wherever the configuration mirrors them.

    The JSON lines hold every step that is logged; `logging.every` thins the mirrors.

    Raises:
        ModuleNotFoundError: a mirror's library is missing.
        OSError: `run_dir` cannot be written.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig, *, run_name: str) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonlLog(run_dir / METRICS_FILE)
        self._timings = JsonlLog(run_dir / TIMINGS_FILE)
        self._every = config.every
        self._mirrors = Mirrors(run_dir, config, run_name)
        starts = JsonlLog(run_dir / PROVENANCE_FILE)
        starts.append(provenance())
        starts.close()

    def log(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] = NO_TIMINGS) -> None:
        """Write one step. What depends on the clock or the machine belongs in `timings`.

        Raises:
            TypeError: a value is no number.
            ValueError: a name is `step`, or in both mappings.
            OSError: the disk is full.
        """
        metrics, timings = _numbers(metrics), _numbers(timings)
        if both := sorted(metrics.keys() & timings.keys()):
            raise ValueError(f"{both} are in metrics and in timings; a name belongs to one of them")
        self._metrics.append({"step": step, **metrics})
        if timings:
            self._timings.append({"step": step, **timings})
        if step % self._every == 0:
            self._mirrors.log(step, {**metrics, **timings})

    @property
    def offset(self) -> int:
        """Bytes of `metrics.jsonl`, for a checkpoint."""
        return self._metrics.offset

    def truncate(self, offset: int) -> None:
        """Go back to a checkpoint's `offset`; timings of later steps go too.

        Raises:
            ValueError: `offset` is not this file's.
        """
        self._metrics.truncate(offset)
        kept = read_jsonl(self._metrics.path)
        _drop_later(self._timings, kept[-1]["step"] if kept else -1)

    def close(self) -> None:
        self._mirrors.close()
        self._timings.close()
        self._metrics.close()


@dataclass(frozen=True)
class SampleRecord:
    """A completion as it is shown to a person."""

    prompt: str
    completion: str
    rewards: Mapping[str, float | None]  # by function; None where not applicable
    reward: float  # the weighted total
    advantage: float  # mean over the tokens
    truncated: bool  # stopped by max_completion_length
    num_tokens: int  # of the completion


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    metrics: dict[str, float]
    timings: dict[str, float]  # what depends on the clock or the machine
    samples: Sequence[SampleRecord] = ()


class SampleLog(JsonlLog):
    """`samples.jsonl`: completions with their rewards."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / SAMPLES_FILE)

    def write(self, step: int, samples: Sequence[SampleRecord]) -> None:
        self.append(*({"step": step, **vars(sample)} for sample in samples))


class EvaluationLog(JsonlLog):
    """`evaluations.jsonl`: held-out scores, by the name of what was evaluated."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / EVALUATIONS_FILE)

    def write(self, step: int, name: str, score: float, interval: Interval, n: int) -> None:
        """`interval` is (low, high); `n` counts questions. One `name` throughout a run makes one curve."""
        self.append({"step": step, "name": name, "score": score, "interval": interval, "n": n})


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    if "step" in values:
        raise ValueError("a metric is named `step`, which every line has already; rename it")
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} = {value!r} is no number; log numbers, or torch scalars") from error
    return numbers


def _drop_later(log: JsonlLog, step: int) -> None:
    """Cut a log, whose steps never decrease, after the last line of `step`."""
    lines = log.path.read_bytes().split(b"\n")[:-1]
    kept = [line for line, record in zip(lines, read_jsonl(log.path), strict=True) if record["step"] <= step]
    log.truncate(sum(len(line) + 1 for line in kept))


class Clock:
    """Where the seconds of a step go, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + elapsed


PACKAGES = (
    *("grpo-fast", "torch", "triton", "transformers", "peft", "datasets", "accelerate", "flash-attn"),
    *("liger-kernel", "vllm"),
)


def provenance() -> dict[str, Any]:
    """One start of a run: UTC time, command line, Python, operating system, device, package versions."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "versions": versions,
    }
