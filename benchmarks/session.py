"""One run of a subcommand: its options, and its contests one after another, on the screen and in the file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .contest import ROUNDS, Contest
from .machine import environment, gpu_state
from .measure import DeviceLost
from .problem import DTYPES
from .record import Measurement, Record, write_json
from .tables import EXPLANATION, console, label, print_measurements, skipped

DONE, FAILED, INTERRUPTED = 0, 1, 130
INTERRUPTION = "interrupted"
Sizes = Mapping[str, tuple[Any, Any, str]]
"""By the option's name: its default on a GPU, its default on a CPU, and what it counts."""


class ByDevice(NamedTuple):
    """A default that depends on the device: `check_common` puts the device's in its place."""

    cuda: Any
    cpu: Any

    def __str__(self) -> str:
        """As `--help` shows it."""
        return f"{self.cuda}; on a CPU {self.cpu}"


def add_common_arguments(parser: argparse.ArgumentParser, *, minutes: float, repeats: int = ROUNDS) -> None:
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"time budget of the command ({minutes:g})"
    )
    parser.add_argument("--repeats", type=positive, default=repeats, help=f"samples at most ({repeats})")
    parser.add_argument("--impl", nargs="+", metavar="WORD", help="implementations whose name contains it")
    dtype = ByDevice("bfloat16", "float32")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is made at random (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one, unless given")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything here, after every shape")


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes, nargs: str | None = None) -> None:
    for name, (cuda, cpu, what) in sizes.items():
        option, usual = "--" + name.replace("_", "-"), ByDevice(cuda, cpu)
        parser.add_argument(option, type=positive, nargs=nargs, default=usual, help=f"{what} (%(default)s)")


def sizes_of(options: argparse.Namespace, sizes: Sizes) -> dict[str, int]:
    return {name: getattr(options, name) for name in sizes}


def check_common(options: argparse.Namespace) -> torch.device:
    """The device, which `options` then name, with its defaults.

    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    if not options.minutes >= 0:
        raise ValueError(f"--minutes must be at least 0, got {options.minutes}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in vars(options).items():
        if isinstance(value, ByDevice):
            setattr(options, name, getattr(value, options.device))
    return torch.device(options.device)


def run_session(
    options: argparse.Namespace,
    contests: Sequence[Contest],
    *,
    conclude: Callable[[list[Measurement]], list[Measurement]] = lambda _: [],
    notes: Sequence[str] = (),
) -> int:
    """Measures until the contests or the time are spent; the exit code.

    What has been measured is in the file after every contest, also when the run is interrupted.

    Args:
        conclude: what follows from all measurements together, appended to them at the end.
        notes: what the shapes do not say, for the screen and the record.
    """
    deadline, device = time.monotonic() + 60 * options.minutes, torch.device(options.device)
    screen = console()
    asked = {name: value for name, value in vars(options).items() if name not in ("handler", "kind")}
    record = Record(options.kind, cells=[], environment=environment(device), options=asked, notes=list(notes))
    found = record.environment
    screen.print(
        f"{found['benchmark_device']}, torch {torch.__version__}, copy "
        f"{found['copy_gigabytes_per_second']:,.0f} GB/s; {options.kind}: {len(contests)} shapes"
    )
    screen.print(*notes, "", sep="\n", markup=False)
    waiting = list(contests)

    def add(measured: list[Measurement]) -> None:
        print_measurements(screen, measured)
        record.cells += measured
        record.not_measured = [contest.shape for contest in waiting]
        write_json(options.json, record)

    while waiting and time.monotonic() < deadline and record.stopped is None:
        contest = waiting.pop(0)
        try:
            contest.measure(deadline, options.repeats)
        except KeyboardInterrupt:
            record.stopped = INTERRUPTION
        except DeviceLost as lost:
            record.stopped, record.culprit = str(lost), lost.culprit
        record.gpu_states.append(gpu_state(device))
        add(contest.results())
    add(conclude(record.cells))
    for name, reason in skipped(record.cells):
        screen.print(f"skipped {name}: {reason}", markup=False)
    if record.cells:
        screen.print(EXPLANATION, style="dim")
    if waiting:
        why = record.stopped or "the time budget is spent"
        first = label(waiting[0].shape)
        screen.print(f"{why}: {len(waiting)} shapes not measured, the first: {first}", markup=False)
    if options.json is not None:
        screen.print(f"written to {options.json}", markup=False)
    return {None: DONE, INTERRUPTION: INTERRUPTED}.get(record.stopped, FAILED)


def positive(text: str) -> int:
    """An argparse type: a whole number from one, with thousands separators if you like."""
    value = int(text.replace(",", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
