"""The measuring engine: implementations of one thing at one shape, in turn (A B C A B C)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from .measure import (
    NO_TIME,
    OK,
    SKIPPED,
    DeviceLost,
    Memory,
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
    seed: int = 0

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def patience(self) -> float:
        """Seconds for the first calls of one implementation."""
        return min(FIRST_CALLS, max(0.0, self.deadline - time.monotonic()) + GRACE)


@dataclass(frozen=True)
class Work:
    """What one repetition achieves, however it is done."""

    flops: float = 0.0
    bytes: float = 0.0  # read and written at least
    tokens: float = 0.0

    def rates(self, seconds: float) -> dict[str, float]:
        parts = ((FLOPS, self.flops), (BYTES, self.bytes), (TOKENS, self.tokens))
        return {name: amount / seconds for name, amount in parts if amount}

    def share(self, seconds: float, ceilings: dict[str, float]) -> float | None:
        """Of the time that the ceilings allow for (the roofline), what part was needed; one is the best."""
        parts = ((FLOPS, self.flops), (BYTES, self.bytes))
        bounds = [amount / ceilings[name] for name, amount in parts if amount and name in ceilings]
        return max(bounds) / seconds if bounds else None


@dataclass(frozen=True)
class Prepared:
    """An implementation that is ready to run."""

    run: Callable[[Stopwatch], object]  # one repetition; it may mark phases
    work: Work = field(default_factory=Work)
    metrics: Callable[[float], dict[str, float]] = lambda _: {}  # of the median's seconds, asked at the end
    accuracy: dict[str, float] = field(default_factory=dict)
    reset: Callable[[], object] = lambda: None  # after each repetition, untimed
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Entrant:
    """An implementation. `prepare` does everything that is not to be timed, and raises what it lacks:
    ImportError for a library, `Unsupported` for anything else."""

    name: str
    prepare: Callable[[], Prepared]
    ceiling: bool = False  # its rates and metrics bound the others'


@dataclass
class _Progress:
    """An entrant on its way through the contest."""

    entrant: Entrant
    prepared: Prepared | None = None
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    memory: Memory | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    failure: tuple[str, str] | None = None  # status, reason

    @property
    def wants_more(self) -> bool:
        enough = len(self.seconds) >= FEWEST and sum(self.seconds) >= SECONDS_EACH
        return self.failure is None and self.prepared is not None and not enough

    def metrics(self) -> dict[str, float]:
        """At the median."""
        if not self.seconds or self.prepared is None:
            return {}
        median = statistics.median(self.seconds)
        return self.prepared.work.rates(median) | self.prepared.metrics(median)

    def measurement(self, shape: dict[str, Any], ceilings: dict[str, float]) -> Measurement:
        late = (SKIPPED, NO_TIME)
        status, reason = self.failure or ((OK, "") if self.seconds else late)
        timed = self.seconds if status == OK else []
        metrics = self.metrics() if timed else {}
        if timed and self.prepared is not None and not self.entrant.ceiling:
            share = self.prepared.work.share(statistics.median(timed), ceilings)
            metrics |= {} if share is None else {"share_of_ceiling": share}
        return Measurement(
            implementation=self.entrant.name,
            shape=shape,
            status=status,
            reason=reason,
            seconds=list(timed),
            time=summarise(timed) if timed else None,
            memory=self.memory,
            accuracy=self.accuracy,
            phases=medians(self.phases) if timed else {},
            metrics=metrics,
            ceilings={} if self.entrant.ceiling else ceilings,
        )


class Contest:
    """Measures one shape. `results` is complete at any time, so an interruption loses nothing measured.

    Args:
        shape: what was asked, for the record.
        share: makes what all entrants need; where it fails, they all do.
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
        wall: bool = False,
        memory: bool = True,
        hurry: bool = False,
    ) -> None:
        self.shape = shape
        self.device = device
        self._share = share
        self._watch = Stopwatch(device, wall)
        self._memory = memory
        self._hurry = hurry
        self._progress = [_Progress(entrant) for entrant in entrants]

    def measure(self, limits: Limits) -> None:
        """Each entrant once to warm up and once for its memory, then all in turn for time.

        Past the deadline, whoever has entered still gets the fewest samples that a median needs.

        Raises:
            DeviceLost: the device takes no more work.
        """
        try:
            if not self._guard(self._share, *self._progress):
                return
            for progress in self._progress:
                if limits.passed:
                    progress.failure = SKIPPED, NO_TIME
                    continue
                patience = at_most(limits.patience) if self._hurry else nullcontext()
                self._guard(lambda p=progress, patience=patience: self._enter(p, patience), progress)
            for _ in range(limits.rounds):
                for progress in self._progress:
                    late = limits.passed and len(progress.seconds) >= FEWEST
                    if progress.wants_more and not late:
                        self._guard(lambda p=progress: self._time(p), progress)
        finally:
            for progress in self._progress:
                if progress.prepared is not None:
                    progress.prepared.close()

    def results(self) -> list[Measurement]:
        """The ceilings first, then the others as they were given."""
        ordered = sorted(self._progress, key=lambda progress: not progress.entrant.ceiling)
        ceilings: dict[str, float] = {}
        for progress in ordered:
            if progress.entrant.ceiling:
                ceilings |= progress.metrics()
        return [progress.measurement(self.shape, ceilings) for progress in ordered]

    def _enter(self, progress: _Progress, patience: Any) -> None:
        with patience:
            prepared = progress.prepared = progress.entrant.prepare()
            progress.accuracy = prepared.accuracy
            self._once(prepared)
            if self._memory and not progress.entrant.ceiling:
                progress.memory = memory_of(lambda: self._once(prepared), self.device)

    def _once(self, prepared: Prepared) -> tuple[float, dict[str, float]]:
        taken = self._watch.time(lambda: prepared.run(self._watch))
        prepared.reset()
        return taken

    def _time(self, progress: _Progress) -> None:
        seconds, phases = self._once(progress.prepared)
        progress.seconds.append(seconds)
        progress.phases.append(phases)

    def _guard(self, action: Callable[[], object], *concerned: _Progress) -> bool:
        """Whether it went well. What goes wrong becomes the entrants' failure; their memory is given back.

        Raises:
            DeviceLost: the device takes no more work, as after an illegal memory access.
        """
        try:
            action()
            synchronize(self.device)
            return True
        except Exception as error:
            failure = failure_of(error)
        try:
            for progress in concerned:
                progress.failure = failure
                prepared, progress.prepared = progress.prepared, None
                if prepared is not None:
                    prepared.reset()
                    prepared.close()
                del prepared
            give_back_memory(self.device)
        except RuntimeError as lost:
            raise DeviceLost(concerned[0].entrant.name, failure[1]) from lost
        return False


def medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each phase; where a repetition did without one, it took no time."""
    names = {name: None for sample in samples for name in sample}
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}
