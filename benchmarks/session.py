"""One run of a subcommand: its bouts one after another, on the screen and in the file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from .contest import ROUNDS, Limits
from .machine import environment, gpu_state
from .measure import DeviceLost
from .problem import DTYPES
from .record import Measurement, Record, write_json
from .tables import EXPLANATION, console, label, print_measurements, skipped

DONE, FAILED, INTERRUPTED = 0, 1, 130
INTERRUPTION = "interrupted"


class Bout(Protocol):
    """What is measured together: the implementations at one shape."""

    shape: dict[str, Any]

    def measure(self, limits: Limits) -> None:
        """Raises DeviceLost where nothing more can be measured; an implementation's failure is a result."""
        ...

    def results(self) -> list[Measurement]:
        """Complete at any time, also after an exception."""
        ...


def add_common_arguments(parser: argparse.ArgumentParser, *, minutes: float, repeats: int = ROUNDS) -> None:
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"time budget of the command ({minutes:g})"
    )
    parser.add_argument("--repeats", type=positive, default=repeats, help=f"samples at most ({repeats})")
    parser.add_argument("--impl", nargs="+", metavar="WORD", help="implementations whose name contains it")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is made at random (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one, unless given")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything here, after every shape")


def add_sizes(parser: argparse.ArgumentParser, nargs: int | str = "+") -> None:
    """The head's axes."""
    for name, what in (("tokens", "tokens N"), ("hidden", "hidden sizes H"), ("vocab", "vocabularies V")):
        parser.add_argument(f"--{name}", type=positive, nargs=nargs, help=what)


def sizes_of(options: argparse.Namespace, usual: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """N, H and V as asked for, where they were."""
    asked = (options.tokens, options.hidden, options.vocab)
    return [given or values for given, values in zip(asked, usual, strict=True)]


def check_common(options: argparse.Namespace) -> torch.device:
    """The device; `options.dtype` is filled in.

    Raises:
        ValueError: a value that cannot be used; the message says which and why.
    """
    if not options.minutes >= 0:
        raise ValueError(f"--minutes must be at least 0, got {options.minutes}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options.dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return device


def run_session(
    kind: str,
    options: argparse.Namespace,
    device: torch.device,
    bouts: Sequence[Bout],
    *,
    conclude: Callable[[list[Measurement]], list[Measurement]] = lambda _: [],
    close: Callable[[Console, list[Measurement]], None] = lambda *_: None,
    notes: Sequence[str] = (),
) -> int:
    """Measures until the bouts or the time are spent; the exit code.

    What has been measured is in the file after every bout, also when the run is interrupted.

    Args:
        conclude: what follows from all measurements together, appended to them at the end.
        close: prints what else there is to say at the end.
        notes: what the shapes do not say, for the screen and the record.
    """
    limits = Limits(time.monotonic() + 60 * options.minutes, options.repeats)
    screen = console()
    asked = {name: value for name, value in vars(options).items() if name != "handler"}
    record = Record(kind, cells=[], environment=environment(device), options=asked, notes=list(notes))
    found = record.environment
    screen.print(
        f"{found['benchmark_device']}, torch {torch.__version__}, copy "
        f"{found['copy_gigabytes_per_second']:,.0f} GB/s; {kind}: {len(bouts)} shapes"
    )
    screen.print(*notes, "", sep="\n", markup=False)
    waiting = list(bouts)

    def add(measured: list[Measurement], **more: Any) -> None:
        nonlocal record
        print_measurements(screen, measured)
        not_measured = [bout.shape for bout in waiting]
        record = replace(record, cells=record.cells + measured, not_measured=not_measured, **more)
        if options.json is not None:
            write_json(options.json, record)

    while waiting and not limits.passed and record.stopped is None:
        bout, stopped, culprit = waiting.pop(0), None, None
        try:
            bout.measure(limits)
        except KeyboardInterrupt:
            stopped = INTERRUPTION
        except DeviceLost as lost:
            stopped, culprit = str(lost), lost.culprit
        states = [*record.gpu_states, gpu_state(device)]
        add(bout.results(), gpu_states=states, stopped=stopped, culprit=culprit)
    add(conclude(record.cells))
    for name, reason in skipped(record.cells):
        screen.print(f"skipped {name}: {reason}", markup=False)
    if record.cells:
        screen.print(EXPLANATION, style="dim")
    if waiting:
        why = record.stopped or "the time budget is spent"
        first = label(waiting[0].shape)
        screen.print(f"{why}: {len(waiting)} shapes not measured, the first: {first}", markup=False)
    close(screen, record.cells)
    if options.json is not None:
        screen.print(f"written to {options.json}", markup=False)
    return {None: DONE, INTERRUPTION: INTERRUPTED}.get(record.stopped, FAILED)


def positive(text: str) -> int:
    """An argparse type: a whole number from one, with thousands separators if you like.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
