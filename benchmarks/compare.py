"""`python -m benchmarks compare BEFORE.json AFTER.json`: what became worse or better beyond noise.

A time changed when its median moved by more than 3 %, and by more than its spread explains: runs of the same
normal noise are told apart once in a hundred comparisons, however few their samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .measure import OK, SKIPPED, Spread
from .record import Measurement, read
from .tables import label

SMALLEST = 0.03  # a relative change of time below this is noise however narrow the quartiles
MEMORY_NOISE = {  # share and bytes
    "allocator": (0.05, 1 << 20),  # torch counts the same every time
    "driver": (0.20, 32 << 20),
}
ERROR_FACTOR = 1.5
ERROR_FLOORS = {"logprob": 1e-6, "loss": 1e-5, "hidden_gradient": 1e-4, "weight_gradient": 1e-4}
ERROR_FLOOR = 1e-6  # of any other error
SIZE = "largest_group"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where anything became worse.

    Raises:
        ValueError: a file that is no record, or two of different subcommands.
    """
    before, after = read(options.before), read(options.after)
    if before.kind != after.kind:
        raise ValueError(
            f"{options.before} is of `{before.kind}`, {options.after} of `{after.kind}`: "
            "compare records of one subcommand"
        )
    pairs = pairs_of(before.cells, after.cells)
    for difference in environment_changes(before.environment, after.environment):
        print(difference)
    worse = 0
    for old, new in pairs:
        for is_worse, what in changes(old, new):
            worse += is_worse
            kind = "REGRESSION" if is_worse else "improvement"
            print(f"{kind}: {new.implementation}: {what} ({label(new.shape)})")
    alone = max(len(before.cells), len(after.cells)) - len(pairs)
    left_out = f", {alone} skipped or in one alone" if alone else ""
    print(f"{len(pairs)} measurements in both{left_out}; {worse} regressions beyond noise")
    return 1 if worse else 0


def pairs_of(
    before: Sequence[Measurement], after: Sequence[Measurement]
) -> list[tuple[Measurement, Measurement]]:
    """Everything measured in both; what one run skipped, or had no time for, is not compared."""
    return [
        (old, new)
        for new in after
        for old in before
        if (old.implementation, old.shape) == (new.implementation, new.shape)
        and SKIPPED not in (old.status, new.status)
    ]


def changes(old: Measurement, new: Measurement) -> Iterator[tuple[bool, str]]:
    """What differs beyond noise, and whether it became worse."""
    if old.status != new.status:
        yield new.status != OK, f"{old.status} → {new.status} {new.reason}".rstrip()
    yield from _errors(old.accuracy, new.accuracy)
    if SIZE in new.metrics:  # found by trying: any difference counts, and another size has another time
        before, after = old.metrics.get(SIZE, 0.0), new.metrics[SIZE]
        if before != after:
            yield after < before, f"largest group {before:,.0f} → {after:,.0f}"
        return
    if old.time is not None and new.time is not None:
        before, after = old.time.median, new.time.median
        if abs(after - before) > max(SMALLEST * before, noise(old.time, new.time)):
            yield after > before, f"{before:.3f} → {after:.3f} ms, {after / before - 1:+.1%}"
    for name, (share, least) in MEMORY_NOISE.items():
        before, after = getattr(old.memory, name, None), getattr(new.memory, name, None)
        if before is not None and after is not None:
            if abs(after - before) > max(least, share * before):
                yield after > before, f"{before / 2**20:,.0f} → {after / 2**20:,.0f} MiB"
            return  # by torch's count where it counts, else by the driver's or the system's


def _errors(old: dict[str, float], new: dict[str, float]) -> Iterator[tuple[bool, str]]:
    """NaN is worse than any number."""
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        floor = ERROR_FLOORS.get(name, ERROR_FLOOR)
        what = f"error of {name.replace('_', ' ')} {a:.1e} → {b:.1e}"
        if a == a and not b <= max(ERROR_FACTOR * a, floor):
            yield True, what
        elif b == b and not a <= max(ERROR_FACTOR * b, floor):
            yield False, what


def environment_changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Why the two runs may differ for another reason than our code."""
    devices = [found.get("benchmark_device", "an unknown device") for found in (before, after)]
    if devices[0] != devices[1]:
        yield f"different machines, {devices[0]} and {devices[1]}: times say little"
    versions = [found.get("versions", {}) for found in (before, after)]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        old, new = (found.get(name, "absent") for found in versions)
        if old != new:
            yield f"{name}: {old} → {new}"


def noise(a: Spread, b: Spread) -> float:
    """How far apart two medians of the same distribution lie at most, 99 times in a hundred; milliseconds.

    In widths of the middle half, which few samples tell badly: 4.3 for 3 samples, 1.8 for 9, 1.0 for 25. The
    factor was fitted to simulated normal samples; heavier tails need less.
    """
    width = (a.upper - a.lower + b.upper - b.lower) / 2
    return (0.6 + 11 / min(a.samples, b.samples)) * width
