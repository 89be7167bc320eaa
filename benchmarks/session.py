"""One run of a subcommand other than `head`: its bouts one after another, on the screen and in the file."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .cell import ROUNDS, Limits
from .environment import environment, gpu_state
from .failures import DeviceLost
from .measurement_table import print_measurements
from .problem import DTYPES
from .record import Measurement, save
from .tables import console

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
    conclude: Callable[[list[Measurement]], list[Measurement]] | None = None,
) -> int:
    """Measures until the bouts or the time are spent; the exit code.

    What has been measured is in the file after every bout, also when the run is interrupted.

    Args:
        conclude: what follows from all measurements together, appended to them at the end.
    """
    deadline = time.monotonic() + 60 * options.minutes
    limits = Limits(deadline, options.repeats, getattr(options, "oracle", True), options.seed)
    return _Session(kind, options, device, limits).run(bouts, conclude)


class _Session:
    def __init__(self, kind: str, options: argparse.Namespace, device: torch.device, limits: Limits) -> None:
        self.kind = kind
        self.path: Path | None = options.json
        self.options = {name: _plain(value) for name, value in vars(options).items() if name != "handler"}
        self.device = device
        self.limits = limits
        self.screen = console()
        self.environment = environment(device)
        self.done: list[Measurement] = []
        self.gpu_states: list[dict[str, str] | None] = []

    def run(
        self, bouts: Sequence[Bout], conclude: Callable[[list[Measurement]], list[Measurement]] | None
    ) -> int:
        found = self.environment
        self.screen.print(
            f"{found['benchmark_device']}, torch {torch.__version__}, copy "
            f"{found['copy_gigabytes_per_second']:,.0f} GB/s; {self.kind}: {len(bouts)} shapes\n"
        )
        waiting = list(bouts)
        stopped = None
        while waiting and not self.limits.passed and stopped is None:
            stopped = self._measure(waiting.pop(0))
            self._save(waiting, stopped)
        if conclude is not None:
            conclusions = conclude(self.done)
            self.done += conclusions
            print_measurements(self.screen, conclusions)
        self._save(waiting, stopped)
        if waiting:
            why = stopped or "the time budget is spent"
            self.screen.print(
                f"{why}: {len(waiting)} shapes not measured, the first: {waiting[0].shape}", markup=False
            )
        if self.path is not None:
            self.screen.print(f"written to {self.path}", markup=False)
        return {None: DONE, INTERRUPTION: INTERRUPTED}.get(stopped, FAILED)

    def _measure(self, bout: Bout) -> str | None:
        """Why nothing more can be measured, if so; what it had measured is kept."""
        stopped = None
        try:
            bout.measure(self.limits)
        except KeyboardInterrupt:
            stopped = INTERRUPTION
        except DeviceLost as lost:
            stopped = str(lost)
        found = bout.results()
        self.done += found
        self.gpu_states.append(gpu_state(self.device))
        print_measurements(self.screen, found)
        return stopped

    def _save(self, waiting: Sequence[Bout], stopped: str | None) -> None:
        if self.path is not None:
            save(
                self.path,
                self.done,
                kind=self.kind,
                environment=self.environment,
                options=self.options,
                gpu_states=self.gpu_states,
                not_measured=[bout.shape for bout in waiting],
                stopped=stopped,
            )


def choose_names(names: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Those that contain one of the wanted words, in any case; all where none is given.

    Raises:
        ValueError: a word that fits no name.
    """
    for word in wanted or ():
        if not any(word.lower() in name.lower() for name in names):
            known = ", ".join(map(repr, names))
            raise ValueError(f"--impl {word!r} is part of no implementation's name; there are {known}")
    return [name for name in names if not wanted or any(word.lower() in name.lower() for word in wanted)]


def write_json(path: Path, document: Any) -> None:
    """Replaces `path` at once, so that an interruption leaves the previous state or this one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


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


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
