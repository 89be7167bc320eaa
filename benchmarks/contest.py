"""Measure implementations of one thing at one shape, in turns (A B C A B C)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .measure import NO_TIME, OK, SKIPPED, Stopwatch, failure_of, give_back_memory, memory_of, synchronize
from .record import Measurement

ROUNDS, FEWEST = 25, 3
SECONDS_EACH = 1.5  # of repetitions: a slow implementation gets fewer samples, but at least FEWEST


@dataclass(frozen=True)
class Prepared:
    """An implementation that is ready to run. Its repetitions may fill in `metrics`."""

    run: Callable[[Stopwatch], object]  # one repetition; it may mark phases
    metrics: dict[str, float] = field(default_factory=dict)  # "tokens" of a repetition become tokens/s
    accuracy: dict[str, float] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Entrant:
    """An implementation by name. `prepare` does everything that is not timed.

    It raises ImportError for a missing library, and `Unsupported` for anything else that it lacks.
    """

    name: str
    prepare: Callable[[], Prepared]


def measure_in_turns(
    shape: dict[str, Any],
    entrants: Sequence[Entrant],
    device: torch.device,
    deadline: float,
    rounds: int = ROUNDS,
) -> list[Measurement]:
    """Run each entrant once to warm up and once for its memory, then all in turns for time.

    Each gets `rounds` samples at most. Past the deadline (on the monotonic clock) one that is warmed up still
    gets `FEWEST`. Giving memory back raises after a kernel that broke the device, which ends the contest.
    """
    watch = Stopwatch(device)
    cells = {one.name: Measurement(one.name, shape, SKIPPED, NO_TIME) for one in entrants}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in cells}
    ready: dict[str, Prepared] = {}

    def attempt(name: str, action: Callable[[], object]) -> None:
        """Turn an error of the action into a failure of the implementation, and give its memory back."""
        try:
            action()
            synchronize(device)
            return
        except Exception as error:
            cells[name].status, cells[name].reason = failure_of(error)
        cells[name].seconds.clear()
        if name in ready:
            ready.pop(name).close()
        give_back_memory(device)

    def enter(one: Entrant) -> None:
        prepared = ready[one.name] = one.prepare()
        watch.time(lambda: prepared.run(watch))
        cells[one.name].peak_bytes = memory_of(lambda: prepared.run(watch), device)

    def sample(name: str) -> None:
        seconds, of_phases = watch.time(lambda: ready[name].run(watch))
        cells[name].seconds.append(seconds)
        phases[name].append(of_phases)

    for one in entrants:
        if time.monotonic() < deadline:
            attempt(one.name, partial(enter, one))
    for _ in range(rounds):
        for name in list(ready):
            timed = cells[name].seconds
            enough = sum(timed) >= SECONDS_EACH or time.monotonic() >= deadline
            if len(timed) < FEWEST or not enough:
                attempt(name, partial(sample, name))
    for name, prepared in list(ready.items()):
        cells[name].status, cells[name].reason, cells[name].phases = OK, "", medians(phases[name])
        cells[name].accuracy, cells[name].metrics = prepared.accuracy, prepared.metrics
        attempt(name, prepared.close)
    return list(cells.values())


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase; a repetition without a phase counts as zero."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}
