"""The time of one repetition and of its phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class _Span:
    name: str
    begin: Any
    end: Any = None
    parent: _Span | None = None


@dataclass
class Stopwatch:
    """Marks phases between events of the stream on CUDA, by the wall clock elsewhere.

    Events don't make the host wait, so that phases cost what they cost without a stopwatch. `wall` is for
    work that other streams or processes do, an inference engine's: the device is waited for at each mark.
    """

    device: torch.device
    wall: bool = False
    _spans: list[_Span] = field(default_factory=list)
    _open: list[_Span] = field(default_factory=list)
    _begin: Any = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for `name`, less what inner phases take."""
        span = _Span(name, self._mark(), parent=self._open[-1] if self._open else None)
        self._spans.append(span)
        self._open.append(span)
        try:
            yield
        finally:
            self._open.remove(span)
            span.end = self._mark()

    def time(self, call: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds of a call, and of the phases marked in it; what lies in no phase is not in the second."""
        self.start()
        call()
        return self.stop()

    def start(self) -> None:
        self._spans.clear()
        self._open.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._begin = self._mark()

    def stop(self) -> tuple[float, dict[str, float]]:
        """Seconds since the start, and of the phases."""
        end = self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        phases: dict[str, float] = {}
        for span in self._spans:
            seconds = self._elapsed(span.begin, span.end)
            phases[span.name] = phases.get(span.name, 0.0) + seconds
            if span.parent is not None:
                phases[span.parent.name] -= seconds
        return self._elapsed(self._begin, end), phases

    @property
    def _by_events(self) -> bool:
        return self.device.type == "cuda" and not self.wall

    def _mark(self) -> Any:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _elapsed(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._by_events else end - begin
