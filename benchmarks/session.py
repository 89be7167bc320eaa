"""One run of a subcommand: its options, and its shapes one after another, on the screen and in the file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from grpo_fast.config.paths import user_path

from .contest import ROUNDS
from .measure import NO_TIME, OK, SKIPPED, failure_of
from .problem import DTYPES
from .record import Measurement, Record, environment, write_json
from .tables import print_table

T = TypeVar("T")
Shape = dict[str, Any]
Bouts = Sequence[tuple[Shape, Callable[[float, int], list[Measurement]]]]
"""Shapes, and how to measure each: `measure(deadline, rounds)`."""
Sizes = Mapping[str, tuple[Any, Any, str]]
"""By the option's name: its default on a GPU, its default on a CPU, and what it counts."""


def by_device(cuda: T, cpu: T) -> T:
    """Return a default of an option: that of a GPU where there is one."""
    return cuda if torch.cuda.is_available() else cpu


def add_common_arguments(parser: argparse.ArgumentParser, *, minutes: float, repeats: int = ROUNDS) -> None:
    parser.add_argument("--minutes", type=float, default=minutes, help=f"time budget ({minutes:g})")
    parser.add_argument("--repeats", type=positive, default=repeats, help=f"samples at most ({repeats})")
    parser.add_argument("--impl", nargs="+", metavar="WORD", help="implementations whose name contains it")
    dtype = by_device("bfloat16", "float32")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random input (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one, unless given")
    parser.add_argument("--json", type=user_path, metavar="OUT", help="the record, written after every shape")


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes, nargs: str | None = None) -> None:
    for name, (cuda, cpu, what) in sizes.items():
        option, default = "--" + name.replace("_", "-"), by_device(cuda, cpu)
        parser.add_argument(option, type=positive, nargs=nargs, default=default, help=f"{what} (%(default)s)")


def sizes_of(options: argparse.Namespace, sizes: Sizes) -> dict[str, int]:
    return {name: getattr(options, name) for name in sizes}


def positive(text: str) -> int:
    """Parse a whole number from 1, with or without thousands separators."""
    value = int(text.replace(",", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def check_common(options: argparse.Namespace) -> torch.device:
    """Return the device.

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
    return torch.device(options.device)


def run_session(options: argparse.Namespace, bouts: Bouts, *, strict: bool = False) -> int:
    """Measure until the shapes or the time are spent; the file has all finished shapes at any time.

    Returns:
        The exit code: 130 after Ctrl-C; 1 in a `strict` session where one failed, or none is right.
    """
    deadline, device = time.monotonic() + 60 * options.minutes, torch.device(options.device)
    asked = {name: value for name, value in vars(options).items() if name not in ("handler", "kind")}
    command = sys.argv[sys.argv.index(options.kind) :] if options.kind in sys.argv else [options.kind]
    record = Record(options.kind, environment(device, command), asked)
    print(f"{record.environment['device']}, torch {torch.__version__}")
    record.not_measured = [shape for shape, _ in bouts]
    for shape, measure in bouts:
        if time.monotonic() >= deadline:
            record.stopped = NO_TIME
            break
        try:
            cells = measure(deadline, options.repeats)
        except KeyboardInterrupt:
            record.stopped = "interrupted"
            break
        except Exception as error:  # of what all implementations share
            cells = [Measurement("all", shape, *failure_of(error))]
        record.cells += cells
        record.not_measured.pop(0)
        print_table(cells)
        write_json(options.json, record)
    write_json(options.json, record)
    skipped = [(cell.implementation, cell.reason) for cell in record.cells if cell.status == SKIPPED]
    for name, reason in dict.fromkeys(skipped):
        print(f"skipped {name}: {reason}")
    if record.stopped:
        print(f"{record.stopped}: {len(record.not_measured)} shapes not measured")
    if record.stopped == "interrupted":
        return 130
    found = {cell.status for cell in record.cells}
    return int(strict and (OK not in found or not found <= {OK, SKIPPED}))
