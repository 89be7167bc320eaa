"""`python -m benchmarks compare BEFORE.json AFTER.json`: what became worse or better beyond noise."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cell import LATE, OK, SKIPPED, Cell, Result
from benchmarks.problem import Setting
from benchmarks.record import load
from benchmarks.tables import console
from benchmarks.timing import Spread

SMALLEST = 0.03  # a relative change of time below this is noise however narrow the quartiles
MEMORY_SHARE, MEMORY_BYTES = 0.05, 1 << 20
ERROR_FACTOR = 1.5
ERROR_FLOORS = {"logprob": 1e-6, "hidden_gradient": 1e-4, "weight_gradient": 1e-4}


@dataclass(frozen=True)
class Change:
    """One quantity of one implementation in one setting that differs beyond noise."""

    setting: Setting
    name: str
    what: str
    worse: bool

    def __str__(self) -> str:
        kind = "REGRESSION" if self.worse else "improvement"
        return f"{kind}: {self.name}: {self.what} ({self.setting.title})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where anything became worse."""
    before, about_before = load(options.before)
    after, about_after = load(options.after)
    screen = console()
    devices = [about["environment"]["benchmark_device"] for about in (about_before, about_after)]
    if devices[0] != devices[1]:
        screen.print(f"different devices: {devices[0]} and {devices[1]}; times say little")
    found = changes(before, after)
    for change in found:
        screen.print(str(change), markup=False, style="red" if change.worse else "green", soft_wrap=True)
    shared = sum(1 for _ in _pairs(before, after))
    screen.print(f"{shared} measurements in both, {sum(c.worse for c in found)} regressions beyond noise")
    return 1 if any(change.worse for change in found) else 0


def changes(before: Sequence[Cell], after: Sequence[Cell]) -> list[Change]:
    """Of everything measured in both; what one run skipped, or had no time for, is not compared."""
    found = []
    for setting, old, new in _pairs(before, after):
        differences = [*_state(old, new), *_time(old, new), *_memory(old, new), *_errors(old, new)]
        found += [Change(setting, new.name, what, worse) for what, worse in differences]
    return found


def _pairs(before: Sequence[Cell], after: Sequence[Cell]) -> Iterator[tuple[Setting, Result, Result]]:
    old = {(cell.setting, result.name): result for cell in before for result in cell.results}
    for cell in after:
        for new in cell.results:
            match = old.get((cell.setting, new.name))
            if match is not None and not {match.state, new.state} & {SKIPPED, LATE}:
                yield cell.setting, match, new


def _state(old: Result, new: Result) -> Iterator[tuple[str, bool]]:
    if old.state != new.state:
        yield f"{old.state} → {new.state} {new.reason}".rstrip(), new.state != OK


def _time(old: Result, new: Result) -> Iterator[tuple[str, bool]]:
    if old.time is None or new.time is None:
        return
    ratio = new.time.median / old.time.median
    if _apart(old.time, new.time) and abs(ratio - 1) > SMALLEST:
        yield f"{old.time.median:.3f} → {new.time.median:.3f} ms, {ratio - 1:+.1%}", ratio > 1


def _apart(old: Spread, new: Spread) -> bool:
    """The middle halves do not overlap."""
    return new.lower > old.upper or new.upper < old.lower


def _memory(old: Result, new: Result) -> Iterator[tuple[str, bool]]:
    values = [r.memory.allocator if r.memory is not None else None for r in (old, new)]
    if None in values:
        return
    difference = values[1] - values[0]
    if abs(difference) > max(MEMORY_BYTES, MEMORY_SHARE * values[0]):
        yield f"{values[0] / 2**20:,.0f} → {values[1] / 2**20:,.0f} MiB", difference > 0


def _errors(old: Result, new: Result) -> Iterator[tuple[str, bool]]:
    if old.accuracy is None or new.accuracy is None:
        return
    for name, floor in ERROR_FLOORS.items():
        a, b = getattr(old.accuracy, name), getattr(new.accuracy, name)
        if a is None or b is None:
            continue
        what = f"error of {name.replace('_', ' ')} {a:.1e} → {b:.1e}"
        if a == a and not b <= max(ERROR_FACTOR * a, floor):
            yield what, True
        elif b == b and not a <= max(ERROR_FACTOR * b, floor):
            yield what, False
