"""The measuring engine: implementations of one thing at one shape, in turn (A B C A B C)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import measure
from .measure import NO_TIME, OK, SKIPPED, DeviceLost, Stopwatch
from .record import Measurement

FLOPS, BYTES, TOKENS = "flops_per_second", "bytes_per_second", "tokens_per_second"
ROUNDS = 25
SECONDS_EACH = 1.5
"""Of repetitions: a slow implementation gets fewer samples than a fast one, but at least `FEWEST`."""
FEWEST = 3
FIRST_CALLS = 120.0
"""Seconds for imports, compilation, autotuning and the first calls of an implementation."""
GRACE = 15.0
"""Seconds beyond a run's deadline to end what has begun."""

Found = dict[str, Any]
"""Fields of a `Measurement`."""
Sample = tuple[float, dict[str, float]]
"""Of one repetition: its seconds, and those of its phases."""


@dataclass(frozen=True)
class Prepared:
    """An implementation that is ready to run."""

    run: Callable[[Stopwatch], Any]  # one repetition; it may mark phases
    work: Mapping[str, float] = field(default_factory=dict)
    """FLOPs, bytes and tokens of one repetition, by the name of their rate."""
    metrics: Callable[[float], dict[str, float]] = lambda _: {}  # of the median's seconds, asked at the end
    found: Found = field(default_factory=dict)  # what is known already
    reset: Callable[[], object] = lambda: None  # after each repetition, untimed
    close: Callable[[], object] = lambda: None
    times_itself: bool = False
    """`run` does several repetitions, warmed up, returns their samples, and puts memory into `found`."""


@dataclass
class Entrant:
    """An implementation. `prepare` does everything that is not to be timed, and raises what it lacks:
    ImportError for a library, `Unsupported` for anything else. It returns what it found where nothing is to
    be timed. The contest fills in the rest."""

    name: str
    prepare: Callable[[], Prepared | Found]
    ceiling: bool = False  # its rates and metrics bound the others'
    prepared: Prepared | None = field(default=None, init=False)
    samples: list[Sample] = field(default_factory=list, init=False)
    rates: dict[str, float] = field(default_factory=dict, init=False)
    found: Found = field(default_factory=lambda: {"status": SKIPPED, "reason": NO_TIME}, init=False)

    @property
    def seconds(self) -> list[float]:
        return [seconds for seconds, _ in self.samples]

    @property
    def wants_more(self) -> bool:
        enough = len(self.samples) >= FEWEST and sum(self.seconds) >= SECONDS_EACH
        return self.prepared is not None and not enough

    def fail(self, status: str, reason: str) -> None:
        """Nothing that was timed counts."""
        self.found |= {"status": status, "reason": reason}
        if self.prepared is not None:
            self.prepared.reset()
            self.prepared.close()
            self.prepared = None

    def finish(self) -> None:
        """Keeps the numbers, and lets go of what was prepared for them."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return
        prepared.close()
        if seconds := self.seconds:
            spread, phases = measure.summarise(seconds), _medians([phases for _, phases in self.samples])
            median = statistics.median(seconds)
            self.rates = {name: amount / median for name, amount in prepared.work.items()}
            self.found |= {"status": OK, "reason": "", "seconds": seconds, "time": spread, "phases": phases}
            self.found["metrics"] = self.rates | prepared.metrics(median)
        self.found |= prepared.found

    def measurement(self, shape: dict[str, Any], ceilings: dict[str, float]) -> Measurement:
        """With the share of the roofline: what the ceilings' rates allow for, one at the best."""
        if self.ceiling:
            return Measurement(self.name, shape, **self.found)
        shares = [self.rates[name] / ceilings[name] for name in (FLOPS, BYTES)
                  if name in self.rates and name in ceilings]  # fmt: skip
        found = Measurement(self.name, shape, **self.found, ceilings=ceilings)
        found.metrics.update({"share_of_ceiling": max(shares)} if shares else {})
        return found


@dataclass
class Contest:
    """Measures one shape; an interruption loses nothing measured."""

    shape: dict[str, Any]  # what was asked, for the record
    entrants: Sequence[Entrant]
    device: torch.device
    share: Callable[[], object] = lambda: None  # makes what all need; where it fails, they all do
    release: Callable[[], object] = lambda: None  # lets go of what was shared
    wall: bool = False  # the repetitions work in other streams or processes
    memory: bool = True  # run each entrant once more for its peak memory
    hurry: bool = False  # who takes too long for its first calls is left out

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.device, self.wall)

    def measure(self, deadline: float, rounds: int = ROUNDS) -> None:
        """Each entrant once to warm up and once for its memory, then all in turn for time.

        Past the deadline, an entrant that was warmed up still gets `FEWEST` samples.

        Args:
            deadline: on the monotonic clock.

        Raises:
            DeviceLost: the device takes no more work.
        """
        try:
            if not self._guard(self.share, *self.entrants):
                return
            for one in self.entrants:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                patience = min(FIRST_CALLS, left + GRACE)
                self._guard(partial(self._enter, one, patience), one)
            for _ in range(rounds):
                for one in self.entrants:
                    late = time.monotonic() >= deadline and len(one.samples) >= FEWEST
                    if one.wants_more and not late:
                        self._guard(lambda one=one: one.samples.extend(self._once(one.prepared)), one)
        finally:
            for one in self.entrants:
                one.finish()
            self.release()

    def results(self) -> list[Measurement]:
        """Of every entrant; complete at any time."""
        ceilings: dict[str, float] = {}
        for one in self.entrants:
            ceilings |= one.found.get("metrics", {}) if one.ceiling else {}
        return [one.measurement(self.shape, ceilings) for one in self.entrants]

    def _enter(self, one: Entrant, patience: float) -> None:
        with measure.at_most(patience) if self.hurry else nullcontext():
            prepared = one.prepare()
            if not isinstance(prepared, Prepared):
                one.found |= {"status": OK, "reason": ""} | prepared
                return
            one.prepared = prepared
            first = self._once(prepared)
        if prepared.times_itself:
            one.samples.extend(first)
        elif self.memory and not one.ceiling:
            one.found["memory"] = measure.memory_of(lambda: self._once(prepared), self.device)

    def _once(self, prepared: Prepared) -> list[Sample]:
        if prepared.times_itself:
            samples = prepared.run(self._watch)
        else:
            samples = [self._watch.time(lambda: prepared.run(self._watch))]
        prepared.reset()
        return samples

    def _guard(self, action: Callable[[], object], *concerned: Entrant) -> bool:
        """Whether the action succeeded. An error becomes the entrants' failure; their memory is given back.

        Raises:
            DeviceLost: the device takes no more work, as after an illegal memory access.
        """
        try:
            action()
            measure.synchronize(self.device)
            return True
        except Exception as error:
            failure = measure.failure_of(error)
        try:
            for one in concerned:
                one.fail(*failure)
            measure.give_back_memory(self.device)
        except RuntimeError as lost:
            raise DeviceLost(concerned[0].name, failure[1]) from lost
        return False


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each phase; where a repetition did without one, it took no time."""
    names = {name: None for sample in samples for name in sample}
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}
