"""Implementations of one thing at one shape, in turn (A B C A B C), with the ceilings among them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .cell import FEWEST, SECONDS_PER_PEER, Limits
from .failures import LATE, OK, DeviceLost, failure_of
from .record import STATUS, Measurement
from .stopwatch import Stopwatch
from .timing import Memory, memory_of, summarise, synchronize

FLOPS, BYTES, TOKENS = "flops_per_second", "bytes_per_second", "tokens_per_second"


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
        bounds = [
            amount / ceilings[name]
            for name, amount in ((FLOPS, self.flops), (BYTES, self.bytes))
            if amount and name in ceilings
        ]
        return max(bounds) / seconds if bounds else None


@dataclass(frozen=True)
class Prepared:
    """An entrant that is ready to run."""

    run: Callable[[Stopwatch], object]  # one repetition; it may mark phases
    work: Work = field(default_factory=Work)
    metrics: Callable[[float], dict[str, float]] = (
        lambda _: {}
    )  # of the median's seconds, asked for at the end
    accuracy: dict[str, float] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Entrant:
    """An implementation. `prepare` does everything that is not to be timed, and raises what it lacks:
    ImportError for a library, `Unsupported` for anything else."""

    name: str
    prepare: Callable[[], Prepared]
    ceiling: bool = False  # its rates bound the others'


@dataclass
class _Progress:
    """An entrant on its way through the contest."""

    entrant: Entrant
    prepared: Prepared | None = None
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    memory: Memory | None = None
    failure: tuple[str, str] | None = None  # state, reason

    @property
    def wants_more(self) -> bool:
        enough = len(self.seconds) >= FEWEST and sum(self.seconds) >= SECONDS_PER_PEER
        return self.failure is None and self.prepared is not None and not enough

    def rates(self) -> dict[str, float]:
        """At the median."""
        if not self.seconds or self.prepared is None:
            return {}
        return self.prepared.work.rates(statistics.median(self.seconds))


class Contest:
    """Measures one shape. `results` is complete at any time, so an interruption loses nothing measured.

    Args:
        shape: what was asked, for the record.
        wall: the repetitions work in other streams or processes.
        memory: whether to run each entrant once more for its peak memory.
    """

    def __init__(
        self,
        shape: dict[str, Any],
        entrants: Sequence[Entrant],
        device: torch.device,
        *,
        wall: bool = False,
        memory: bool = True,
    ) -> None:
        self.shape = shape
        self.device = device
        self._watch = Stopwatch(device, wall)
        self._memory = memory
        self._progress = [_Progress(entrant) for entrant in entrants]

    def measure(self, limits: Limits) -> None:
        """Each entrant once to warm up and once for its memory, then all in turn for time.

        Past the deadline, whoever has entered still gets the fewest samples that a median needs.

        Raises:
            DeviceLost: the device takes no more work.
        """
        try:
            for progress in self._progress:
                if limits.passed:
                    progress.failure = LATE, ""
                else:
                    self._guard(progress, self._enter)
            for _ in range(limits.rounds):
                for progress in self._progress:
                    late = limits.passed and len(progress.seconds) >= FEWEST
                    if progress.wants_more and not late:
                        self._guard(progress, self._time)
        finally:
            for progress in self._progress:
                if progress.prepared is not None:
                    progress.prepared.close()

    def results(self) -> list[Measurement]:
        """The ceilings first, then the others as they were given."""
        ceilings: dict[str, float] = {}
        for progress in self._progress:
            if progress.entrant.ceiling:
                ceilings |= progress.rates()
        ordered = sorted(self._progress, key=lambda progress: not progress.entrant.ceiling)
        return [self._result(progress, ceilings) for progress in ordered]

    def _result(self, progress: _Progress, ceilings: dict[str, float]) -> Measurement:
        state, reason = progress.failure or ((OK, "") if progress.seconds else (LATE, ""))
        timed = progress.seconds if state == OK else []
        return Measurement(
            implementation=progress.entrant.name,
            shape=self.shape,
            status=STATUS[state],
            reason=reason or (state if state == LATE else ""),
            seconds=list(timed),
            time=summarise(timed) if timed else None,
            memory=progress.memory,
            accuracy={} if progress.prepared is None else progress.prepared.accuracy,
            phases=_medians(progress.phases) if timed else {},
            metrics=_metrics(progress, ceilings) if timed else {},
            ceilings={} if progress.entrant.ceiling else ceilings,
        )

    def _enter(self, progress: _Progress) -> None:
        progress.prepared = progress.entrant.prepare()

        def once() -> object:
            return self._watch.time(lambda: progress.prepared.run(self._watch))

        once()
        if self._memory and not progress.entrant.ceiling:
            progress.memory = memory_of(once, self.device)

    def _time(self, progress: _Progress) -> None:
        seconds, phases = self._watch.time(lambda: progress.prepared.run(self._watch))
        progress.seconds.append(seconds)
        progress.phases.append(phases)

    def _guard(self, progress: _Progress, action: Callable[[_Progress], None]) -> None:
        """What goes wrong becomes the entrant's failure; its memory is given back.

        Raises:
            DeviceLost: the device takes no more work, as after an illegal memory access.
        """
        try:
            action(progress)
            synchronize(self.device)
            return
        except Exception as error:
            progress.failure = failure_of(error)
        try:
            prepared, progress.prepared = progress.prepared, None
            if prepared is not None:
                prepared.close()
            del prepared
            gc.collect()
            synchronize(self.device)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(progress.entrant.name, progress.failure[1]) from lost


def _medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name: None for sample in samples for name in sample}
    return {name: statistics.median(sample.get(name, 0.0) for sample in samples) for name in names}


def _metrics(progress: _Progress, ceilings: dict[str, float]) -> dict[str, float]:
    median = statistics.median(progress.seconds)
    metrics = progress.rates() | progress.prepared.metrics(median)
    if not progress.entrant.ceiling:
        share = progress.prepared.work.share(median, ceilings)
        if share is not None:
            metrics["share_of_ceiling"] = share
    return metrics
