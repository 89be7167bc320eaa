"""The measuring engine: implementations of one thing at one shape, in turn (A B C A B C)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .measure import (
    NO_TIME,
    OK,
    SKIPPED,
    DeviceLost,
    Stopwatch,
    at_most,
    failure_of,
    give_back_memory,
    memory_of,
    summarise,
    synchronize,
)
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


@dataclass(frozen=True)
class Limits:
    """Of the whole command."""

    deadline: float  # on the monotonic clock
    rounds: int = ROUNDS

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.deadline


@dataclass(frozen=True)
class Work:
    """What one repetition achieves, however it is done."""

    flops: float = 0.0
    bytes: float = 0.0  # read and written at least
    tokens: float = 0.0

    def rates(self, seconds: float) -> dict[str, float]:
        parts = ((FLOPS, self.flops), (BYTES, self.bytes), (TOKENS, self.tokens))
        return {name: amount / seconds for name, amount in parts if amount}

    def share(self, seconds: float, ceilings: dict[str, float]) -> dict[str, float]:
        """Of the time that the ceilings allow for (the roofline), what part was needed; one is the best."""
        parts = ((FLOPS, self.flops), (BYTES, self.bytes))
        bounds = [amount / ceilings[name] for name, amount in parts if amount and name in ceilings]
        return {"share_of_ceiling": max(bounds) / seconds} if bounds else {}


@dataclass(frozen=True)
class Prepared:
    """An implementation that is ready to run."""

    run: Callable[[Stopwatch], object] | None  # one repetition; it may mark phases. None: nothing to time
    work: Work = field(default_factory=Work)
    metrics: Callable[[float], dict[str, float]] = lambda _: {}  # of the median's seconds, asked at the end
    accuracy: dict[str, float] = field(default_factory=dict)
    reset: Callable[[], object] = lambda: None  # after each repetition, untimed
    close: Callable[[], object] = lambda: None


@dataclass
class Entrant:
    """An implementation. `prepare` does everything that is not to be timed, and raises what it lacks:
    ImportError for a library, `Unsupported` for anything else. The contest fills in the rest."""

    name: str
    prepare: Callable[[], Prepared]
    ceiling: bool = False  # its rates and metrics bound the others'
    prepared: Prepared | None = field(default=None, init=False)
    seconds: list[float] = field(default_factory=list, init=False)
    phases: list[dict[str, float]] = field(default_factory=list, init=False)
    work: Work = field(default_factory=Work, init=False)
    found: dict[str, Any] = field(default_factory=lambda: {"status": SKIPPED, "reason": NO_TIME}, init=False)
    """Fields of its `Measurement`."""

    @property
    def wants_more(self) -> bool:
        enough = len(self.seconds) >= FEWEST and sum(self.seconds) >= SECONDS_EACH
        return self.prepared is not None and self.prepared.run is not None and not enough

    def fail(self, status: str, reason: str) -> None:
        """Nothing that was timed counts."""
        self.found |= {"status": status, "reason": reason}
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            prepared.reset()
            prepared.close()

    def finish(self) -> None:
        """Keeps the numbers, and lets go of what was prepared for them."""
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return
        prepared.close()
        if prepared.run is None:
            self.found |= {"status": OK, "reason": "", "metrics": prepared.metrics(0.0)}
        if self.seconds:
            median = statistics.median(self.seconds)
            self.work = prepared.work
            self.found |= {
                "status": OK,
                "reason": "",
                "seconds": self.seconds,
                "time": summarise(self.seconds),
                "phases": medians(self.phases),
                "metrics": prepared.work.rates(median) | prepared.metrics(median),
            }

    def measurement(self, shape: dict[str, Any], ceilings: dict[str, float]) -> Measurement:
        if self.ceiling:
            return Measurement(self.name, shape, **self.found)
        found = Measurement(self.name, shape, **self.found, ceilings=ceilings)
        if not found.seconds:
            return found
        share = self.work.share(statistics.median(found.seconds), ceilings)
        return replace(found, metrics=found.metrics | share)


class Contest:
    """Measures one shape; an interruption loses nothing measured.

    Args:
        shape: what was asked, for the record.
        share: makes what all entrants need; where it fails, they all do.
        release: lets go of what was shared.
        wall: the repetitions work in other streams or processes.
        memory: whether to run each entrant once more for its peak memory.
        hurry: whether who takes too long for its first calls is left out.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        entrants: Sequence[Entrant],
        device: torch.device,
        *,
        share: Callable[[], object] = lambda: None,
        release: Callable[[], object] = lambda: None,
        wall: bool = False,
        memory: bool = True,
        hurry: bool = False,
    ) -> None:
        self.shape = shape
        self._entrants = entrants
        self._device = device
        self._share, self._release = share, release
        self._watch = Stopwatch(device, wall)
        self._memory = memory
        self._hurry = hurry

    def measure(self, limits: Limits) -> None:
        """Each entrant once to warm up and once for its memory, then all in turn for time.

        Past the deadline, whoever has entered still gets the fewest samples that a median needs.

        Raises:
            DeviceLost: the device takes no more work.
        """
        try:
            if not self._guard(self._share, *self._entrants):
                return
            for one in self._entrants:
                if limits.passed:
                    break
                patience = min(FIRST_CALLS, max(0.0, limits.deadline - time.monotonic()) + GRACE)
                hurry = at_most(patience) if self._hurry else nullcontext()
                self._guard(lambda one=one, hurry=hurry: self._enter(one, hurry), one)
            for _ in range(limits.rounds):
                for one in self._entrants:
                    late = limits.passed and len(one.seconds) >= FEWEST
                    if one.wants_more and not late:
                        self._guard(lambda one=one: self._time(one), one)
        finally:
            for one in self._entrants:
                one.finish()
            self._release()

    def results(self) -> list[Measurement]:
        """The ceilings first, then the others as they were given."""
        ordered = sorted(self._entrants, key=lambda one: not one.ceiling)
        ceilings: dict[str, float] = {}
        for one in ordered:
            ceilings |= one.found.get("metrics", {}) if one.ceiling else {}
        return [one.measurement(self.shape, ceilings) for one in ordered]

    def _enter(self, one: Entrant, hurry: Any) -> None:
        with hurry:
            prepared = one.prepared = one.prepare()
            one.found["accuracy"] = prepared.accuracy
            if prepared.run is None:
                return
            self._once(prepared)
            if self._memory and not one.ceiling:
                one.found["memory"] = memory_of(lambda: self._once(prepared), self._device)

    def _once(self, prepared: Prepared) -> tuple[float, dict[str, float]]:
        taken = self._watch.time(lambda: prepared.run(self._watch))
        prepared.reset()
        return taken

    def _time(self, one: Entrant) -> None:
        seconds, phases = self._once(one.prepared)
        one.seconds.append(seconds)
        one.phases.append(phases)

    def _guard(self, action: Callable[[], object], *concerned: Entrant) -> bool:
        """Whether it went well. What goes wrong becomes the entrants' failure; their memory is given back.

        Raises:
            DeviceLost: the device takes no more work, as after an illegal memory access.
        """
        try:
            action()
            synchronize(self._device)
            return True
        except Exception as error:
            failure = failure_of(error)
        try:
            for one in concerned:
                one.fail(*failure)
            give_back_memory(self._device)
        except RuntimeError as lost:
            raise DeviceLost(concerned[0].name, failure[1]) from lost
        return False


def medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each phase; where a repetition did without one, it took no time."""
    names = {name: None for sample in samples for name in sample}
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}
