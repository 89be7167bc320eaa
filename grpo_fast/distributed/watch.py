"""Watch the other ranks: a thread publishes a heartbeat once a second and reads those of the others.

When a rank is lost or fails, the thread interrupts the main thread with an error that names the rank. It ends
the process if the main thread does not leave, as in a collective of NCCL. torchrun ends all ranks when a
process dies; the watch covers lost hosts, other launchers and errors.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

from torch.distributed import Store

BEAT = 1.0  # seconds between two heartbeats
GRACE = 15.0  # seconds in which the main thread may leave
COLLECTIVE = re.compile("gloo|nccl|pair closure", re.IGNORECASE)  # in the RuntimeErrors of collectives
GO_ON = "; continue from the newest checkpoint with --resume (torchrun --max-restarts does it by itself)"
KEY = "grpo_fast/rank/{}"  # of a rank's heartbeat in the store


class RankError(RuntimeError):
    """Another rank failed, is lost, or is elsewhere."""


@dataclass
class Beat:
    """The heartbeat of a rank. Times are of its own clock."""

    rank: int
    host: str
    process: int
    sent: float = 0.0
    place: str | None = None
    entered: float = 0.0
    exchanges: int = 0  # finished with all ranks
    failure: str | None = None  # since the last exchange
    apart: bool = False  # it joins no further exchange

    def __str__(self) -> str:
        where = f", {self.sent - self.entered:.0f} s at {self.place}" if self.place else ""
        return f"rank {self.rank} (process {self.process} on host {self.host}{where})"


class Watch:
    """Watches the other ranks. The main thread enters the context when all ranks have joined.

    Args:
        store: shared by all ranks.
        timeout: seconds without a heartbeat after which a rank is lost.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.timeout = timeout
        self.store: Store = cast("Any", store).clone()  # with its own connection
        self.store.set_timeout(timedelta(seconds=timeout))
        self.own = Beat(rank, socket.gethostname(), os.getpid())
        self.keys = [KEY.format(other) for other in range(size) if other != rank]
        self.others: dict[int, tuple[float, Beat]] = {}  # the newest heartbeats, with the time of arrival
        self.working = False  # the main thread may be interrupted
        self.interruption: RankError | None = None
        self.agreed: BaseException | None = None  # the error that all ranks know
        self.lost: str | None = None  # why no exchange can succeed any more
        self.left = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.publish()

    def __enter__(self) -> Watch:
        self.main = threading.get_ident()
        self.handler = signal.signal(signal.SIGURG, self.interrupt)  # an otherwise unused signal
        self.read()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.thread.join()
        signal.signal(signal.SIGURG, self.handler)

    def meet(self, size: int, timeout: timedelta) -> None:
        """Wait until all ranks have published a heartbeat; raise RankError with the missing ones."""
        missing, end = [*range(size)], time.monotonic() + timeout.total_seconds()
        while missing := [rank for rank in missing if not self.store.check([KEY.format(rank)])]:
            if time.monotonic() > end:
                named = ", ".join(map(str, missing))
                waited = f"{timeout.total_seconds():.0f} s (distributed.timeout)"
                raise RankError(f"rank {named} did not join within {waited}: its log says why")
            time.sleep(0.1)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Name where this rank is. An error that leaves the block is published, and ends all exchanges.

        Raises:
            RankError: instead of a collective's own error, or at once if a rank is lost.
        """
        own = self.own
        outer = own.place, own.entered, self.working
        own.place, own.entered, self.working = place, time.monotonic(), False
        self.publish()
        try:
            if self.lost:
                raise RankError(self.lost)
            yield
        except BaseException as error:
            explained = self.explained(error)
            if explained is not self.agreed:
                self.fail(explained, apart=True)
            if explained is error:
                raise
            raise explained from error
        finally:
            own.place, own.entered, self.working = outer

    @contextmanager
    def work(self) -> Iterator[None]:
        """Interrupt this block with RankError once its result cannot be used."""
        outer, self.working, self.interruption = self.working, True, None
        try:
            self.interrupt()
            yield
        except Exception as error:
            # Libraries catch the interruption and raise another error, as torch's checkpoints do.
            if self.interruption is None or isinstance(error, RankError):
                raise
            raise self.interruption from error
        finally:
            self.working = outer

    def interrupt(self, *_: object) -> None:
        if self.working and (reason := self.abort_reason()):
            self.interruption = RankError(reason)
            raise self.interruption

    def explained(self, error: BaseException) -> BaseException:
        """Return a collective's error as one that names the rank, and any other error unchanged."""
        ours = isinstance(error, RankError) or not isinstance(error, RuntimeError)
        if ours or not COLLECTIVE.search(str(error)):
            return error
        begun, at_fault = time.monotonic(), [beat for _, beat in self.others.values()]
        while at_fault and not self.abort_reason() and time.monotonic() < begun + 4 * BEAT:
            time.sleep(BEAT / 10)
            at_fault = [beat for read, beat in self.others.values() if read < begun]
        self.publish()
        named = ", ".join(map(str, at_fault or [beat for _, beat in self.others.values()]))
        return RankError(self.abort_reason() or f"{named} does not answer: {error}{GO_ON}")

    def fail(self, error: BaseException, *, apart: bool = False) -> str:
        """Publish this rank's error, and return its text for the others."""
        own, text = self.own, str(error).removesuffix(GO_ON)
        if not isinstance(error, RankError):
            who = f"rank {own.rank} (process {own.process} on host {own.host})"
            text = f"{who} failed at {own.place}: {type(error).__name__}: {error}"
        own.failure = own.failure or text
        if apart:
            own.apart, self.lost = True, self.lost or own.failure + GO_ON
        self.publish()
        return text

    def abort_reason(self) -> str | None:
        """Return why this rank's work is useless: a rank is lost, or failed before the next exchange."""
        beats = (beat for _, beat in self.others.values() if beat.exchanges >= self.own.exchanges)
        return self.lost or next((beat.failure for beat in beats if beat.failure), None)

    def publish(self) -> None:
        self.own.sent = time.monotonic()
        with suppress(RuntimeError):  # `run` reports a lost store
            self.store.set(KEY.format(self.own.rank), json.dumps(asdict(self.own)))

    def read(self) -> None:
        """Read the others' heartbeats, and find lost ranks."""
        now, causes = time.monotonic(), []
        for text in self.store.multi_get(self.keys):
            beat = Beat(**json.loads(text))
            read, known = self.others.get(beat.rank, (now, beat))
            read = read if known.sent == beat.sent else now
            self.others[beat.rank] = read, beat
            if beat.apart:
                causes.append(str(beat.failure))
            elif now - read > self.timeout:
                remedy = "raise distributed.heartbeat_timeout if it was only slow"
                causes.append(f"{beat} has given no sign of life for {self.timeout:.0f} s ({remedy})")
        if causes and not self.lost:
            self.lost = "; ".join(dict.fromkeys(causes)) + GO_ON

    def run(self) -> None:
        """Publish and read until the end, and end the process if its main thread does not leave."""
        since: float | None = None
        while not self.left.wait(BEAT):
            try:
                self.publish()
                self.read()
            except RuntimeError as error:
                self.lost = self.lost or f"the store of the ranks does not answer: {error}{GO_ON}"
            reason = self.abort_reason() if self.own.place else None
            if reason is None:
                since = None
            elif since is None:
                since = time.monotonic()
                signal.pthread_kill(self.main, signal.SIGURG)
            elif time.monotonic() - since > GRACE:
                print(f"grpo-fast: {self.own} cannot go on and ends: {reason}", file=sys.stderr, flush=True)
                self.fail(RankError(reason), apart=True)
                sys.stdout.flush()
                os._exit(1)
