"""Write a run's files. A resumed run continues each file where its checkpoint left it.

| file | one line is | same bytes after kill and resume |
|---|---|---|
| `metrics.jsonl` | a step's metrics | yes |
| `samples.jsonl` | a sampled completion with its rewards | yes |
| `evaluations.jsonl` | a held-out score | yes |
| `alerts.jsonl` | an alert that was raised, or has cleared | yes |
| `timings.jsonl` | a step's seconds, tokens/s, memory | no: wall-clock |
| `provenance.jsonl` | a start: versions, device, command | no |

NaN and infinity are written as null.
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from errno import ENOENT
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from grpo_fast.config.record import LoggingConfig
from grpo_fast.config.secrets import masked_command
from grpo_fast.data.types import Message
from grpo_fast.record.alerts import Alert
from grpo_fast.record.files import append_jsonl, read_jsonl, rewind_jsonl, sync
from grpo_fast.record.mirrors import KINDS, table_of
from grpo_fast.record.summary import Interval, before_after

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
SAMPLES_FILE = "samples.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ALERTS_FILE = "alerts.jsonl"
PROVENANCE_FILE = "provenance.jsonl"
FILES = (METRICS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, ALERTS_FILE, TIMINGS_FILE, PROVENANCE_FILE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRecord:
    """One line of `samples.jsonl`."""

    group: int  # within the step; completions of one prompt share it
    question: str | Sequence[Message]  # the prompt as the rewards see it: text, or a conversation
    prompt: str  # as the model reads it
    completion: str
    rewards: Mapping[str, float | None]  # of each function, then penalties; None where not applicable
    reward: float  # weighted sum of the applicable parts
    advantage: float  # mean over the tokens
    truncated: bool  # by max_completion_length
    num_tokens: int  # that the model wrote
    weights: Mapping[str, float] = field(default_factory=dict)  # of each part of `rewards`
    extra: Mapping[str, Any] = field(default_factory=dict)  # columns that rewards logged
    messages: Sequence[Message] | None = None  # the completion, with tools or an environment


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step."""

    metrics: dict[str, float]
    timings: dict[str, float]  # values that depend on the clock or the machine
    samples: Sequence[SampleRecord] = ()


class RunLogs:
    """A run's files and its mirrors.

    The files have every step; `logging.every` thins only the mirrors. All methods raise OSError where
    `run_dir` cannot be written or the disk is full.
    """

    def __init__(self, run_dir: Path, config: LoggingConfig) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._every, self._run_dir = config.every, run_dir
        mirrors = (mirror for library, mirror in KINDS.items() if getattr(config, library))
        self._mirrors = [mirror(run_dir, config.project) for mirror in mirrors]
        for name in FILES:
            rewind_jsonl(run_dir / name)
        append_jsonl(run_dir / PROVENANCE_FILE, provenance())

    def metrics(
        self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None
    ) -> None:
        """Write one step. Values that depend on the clock or the machine belong in `timings`."""
        metrics, timings = ({name: float(n) for name, n in (of or {}).items()} for of in (metrics, timings))
        self._append(METRICS_FILE, {"step": step, **metrics})
        if timings:
            self._append(TIMINGS_FILE, {"step": step, **timings})
        if step % self._every == 0:
            self._mirror("log", step, {**metrics, **timings})

    def samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        self._append(SAMPLES_FILE, *({"step": step, **vars(sample)} for sample in samples))
        if samples:
            self._mirror("table", step, table_of(samples))

    def evaluation(
        self, step: int, name: str, score: float, interval: Interval, n: int, criterion: str = ""
    ) -> None:
        """Write a score of `n` questions by a criterion such as `exact_match>=1`; one `name` is one curve."""
        record = {"step": step, "name": name, "score": score, "interval": interval, "n": n}
        record |= {"criterion": criterion} if criterion else {}
        self._append(EVALUATIONS_FILE, record)

    def alert(self, alert: Alert) -> None:
        self._append(ALERTS_FILE, vars(alert))

    def require(self) -> None:
        """Raise FileNotFoundError if a file of the run was removed during the run."""
        for name in FILES:
            if not (path := self._run_dir / name).exists():
                remedy = "restore it and resume the run, or start a new run"
                raise FileNotFoundError(ENOENT, f"was removed during the run; {remedy}", str(path))

    def _append(self, name: str, *records: Mapping[str, Any]) -> None:
        self.require()
        append_jsonl(self._run_dir / name, *records)

    def rewind(self, step: int) -> None:
        """Remove the records after a step; a new run rewinds to -1."""
        for name in FILES:
            rewind_jsonl(self._run_dir / name, step)

    def sync(self) -> None:
        """Flush the files to disk, before a checkpoint."""
        if not self._run_dir.exists():
            self.require()
        for path in (self._run_dir / name for name in FILES):
            if path.exists():
                sync(path)

    def _mirror(self, method: str, *arguments: Any) -> None:
        """Call each mirror; one that fails is dropped with a warning."""
        for mirror in list(self._mirrors):
            try:
                getattr(mirror, method)(*arguments)
            except Exception as error:
                self._mirrors.remove(mirror)
                name, has_all = type(mirror).__name__, "metrics.jsonl and samples.jsonl have everything"
                logger.warning("%s failed (%r) and gets nothing more; %s", name, error, has_all)

    def close(self) -> None:
        self._mirror("close")


def held_out_outcome(run_dir: Path) -> str | None:
    """Return the held-out score before → after, or None until both are there."""
    scores = [one for one in read_jsonl(run_dir / EVALUATIONS_FILE) if one["name"] == "held-out"]
    scores = [one for one in scores if one["score"] is not None]
    if len(scores) < 2:
        return None
    share = f", share of {scores[-1]['criterion']}" if scores[-1].get("criterion") else ""
    return f"held-out score{share}: {before_after(scores[0], scores[-1])}"


class Clock:
    """The seconds of a step by phase."""

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
    *("grpo-fast", "torch", "triton", "transformers", "peft", "datasets", "accelerate"),
    *("liger-kernel", "vllm"),
)


def provenance() -> dict[str, Any]:
    """Return the UTC time, command line, Python, operating system, device and package versions."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions["torch"] = torch.__version__  # with its build, as in 2.13.0+cpu
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": masked_command(sys.argv),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "versions": versions,
    }
