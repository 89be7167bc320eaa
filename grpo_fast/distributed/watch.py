"""Ranks watch each other: a thread of each tells once a second how its rank is, and hears of the others.

A collective waits for all ranks, and NCCL's cannot be interrupted. Where a rank is lost or has failed, each
other one's watch calls its main thread away from its work, says whose fault the error of a collective is, and
ends the process with a message where the main thread stays.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

import psutil
from torch.distributed import Store

BEAT = 1.0  # seconds from one sign of life to the next
LOST = 20.0  # seconds without one: an extension may hold the GIL for long
GRACE = 15.0  # seconds for the main thread to leave by itself
KEY = "grpo_fast/watch/{}"
COLLECTIVE = re.compile("gloo|nccl|pair closure", re.IGNORECASE)  # in its RuntimeErrors


class RankError(RuntimeError):
    """Another rank has failed, is lost, or is at another place."""


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself."""

    rank: int
    host: str
    process: int
    node: str | None  # the number of its launcher, whose processes see each other
    sent: float  # by the rank's own clock
    place: str | None
    since: float  # seconds there
    exchanges: int  # that it has finished
    failure: str | None  # in the exchange that comes next, or for good
    heard: bool  # the failure is that of another rank
    apart: bool  # for good: it takes part in no exchange any more

    def __str__(self) -> str:
        where = f", {self.since:.0f} s at {self.place}" if self.place else ""
        return f"rank {self.rank} (process {self.process} on host {self.host}{where})"

    def ended(self, node: str | None) -> bool:
        """Whether the process, if it is one of this node, is no more."""
        if node is None or node != self.node:
            return False
        try:
            return psutil.Process(self.process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


class Watch:
    """Of one rank; a context, entered by its main thread when all have joined.

    Args:
        store: of all ranks.

    Attributes:
        exchanges: of all ranks that this one has finished.
        agreed: the error that all ranks know of.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store: Store = cast("Any", store).clone()  # a connection of its own
        self.rank, self.size = rank, size
        self.store.set_timeout(timedelta(seconds=LOST))
        self.host, self.node = socket.gethostname(), os.environ.get("GROUP_RANK")
        self.place: str | None = None
        self.entered = time.monotonic()
        self.working = False  # may be called away
        self.exchanges = 0
        self.failure: str | None = None
        self.heard = self.apart = False
        self.agreed: BaseException | None = None
        self.beats: dict[int, tuple[float, Beat]] = {}  # of the others, and when each was heard
        self.lost: str | None = None  # why no exchange can succeed any more
        self.left = threading.Event()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.tell()

    def __enter__(self) -> Watch:
        self.main = threading.get_ident()
        self.handler = signal.signal(signal.SIGURG, self.called_away)  # a signal that nobody sends
        self.hear()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.thread.join()
        signal.signal(signal.SIGURG, self.handler)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Where this rank is, for messages. An error that leaves it is told to the others.

        Raises:
            RankError: in the stead of a collective's error; at once where a rank is lost.
        """
        outer = self.place, self.entered, self.working
        self.place, self.entered, self.working = place, time.monotonic(), False
        self.tell()
        try:
            if self.lost or self.apart:
                raise RankError(self.lost or f"the ranks are apart: {self.failure}")
            yield
        except BaseException as error:
            explained = self.explained(error)
            if explained is not self.agreed:
                self.fail(explained, apart=True)
            if explained is error:
                raise
            raise explained from error
        finally:
            self.place, self.entered, self.working = outer

    @contextmanager
    def work(self) -> Iterator[None]:
        """What the main thread is called away from; raises RankError where the work is for nothing."""
        outer, self.working = self.working, True
        try:
            self.called_away()
            yield
        finally:
            self.working = outer

    def finished(self) -> None:
        """An exchange of all ranks; what failed in it they know."""
        if not self.apart:
            self.failure, self.heard = None, False
        self.exchanges += 1

    def explained(self, error: BaseException) -> BaseException:
        """A collective's error as one that says whose fault it is; any other as it is."""
        if not isinstance(error, RuntimeError) or isinstance(error, RankError):
            return error
        return RankError(self.verdict(error)) if COLLECTIVE.search(str(error)) else error

    def fail(self, error: BaseException, *, apart: bool = False) -> str:
        """Tell the others; returns what they hear."""
        who = f"rank {self.rank} (process {os.getpid()} on host {self.host})"
        own = f"{who} failed at {self.place}: {type(error).__name__}: {error}"
        if not self.apart:  # what follows a failure is not told in its stead
            self.heard, self.apart = isinstance(error, RankError), apart
            self.failure = str(error) if self.heard else own
            self.tell()
        return self.failure or own

    def trouble(self) -> str | None:
        """Why this rank's work is for nothing: a rank is lost, or has failed in an exchange yet to come."""
        failed = [
            beat for _, beat in self.beats.values() if beat.failure and beat.exchanges >= self.exchanges
        ]
        return self.lost or cause(failed)

    def verdict(self, error: RuntimeError) -> str:
        """Whose fault it is, once each other rank has been heard of since or is lost."""
        now = time.monotonic()
        while not self.trouble() and any(heard < now + BEAT for heard, _ in self.beats.values()):
            time.sleep(BEAT / 10)
        if trouble := self.trouble():
            return trouble
        others = [str(beat) for _, beat in self.beats.values()]
        return f"{self.beat()} was left waiting by {', '.join(others)}: {error}; {go_on()}"

    def beat(self) -> Beat:
        now = time.monotonic()
        told = self.failure, self.heard, self.apart
        me = self.rank, self.host, os.getpid(), self.node
        return Beat(*me, now, self.place, now - self.entered, self.exchanges, *told)

    def tell(self) -> None:
        with suppress(RuntimeError):  # `hear` says that the store is gone
            self.store.set(KEY.format(self.rank), json.dumps(asdict(self.beat())))

    def hear(self) -> None:
        others = [KEY.format(rank) for rank in range(self.size) if rank != self.rank]
        now = time.monotonic()
        for text in self.store.multi_get(others):
            beat = Beat(**json.loads(text))
            heard, before = self.beats.get(beat.rank, (now, None))
            self.beats[beat.rank] = (heard, before) if before and before.sent == beat.sent else (now, beat)
        away = [b for heard, b in self.beats.values() if b.apart or now - heard > LOST or b.ended(self.node)]
        self.lost = f"{cause(away)}; {go_on()}" if away else None

    def run(self) -> None:
        """The thread."""
        since: float | None = None
        while not self.left.wait(BEAT):
            try:
                self.tell()
                self.hear()
            except RuntimeError as error:
                self.lost = f"the store of the ranks does not answer, its process is gone: {error}; {go_on()}"
            trouble = self.trouble() if self.place else None
            if trouble is None:
                since = None
            elif since is None:
                since = time.monotonic()
                signal.pthread_kill(self.main, signal.SIGURG)
            elif time.monotonic() - since > GRACE:
                self.end(trouble)

    def called_away(self, *_: object) -> None:
        """The main thread, wherever it is in Python."""
        if self.working and (trouble := self.trouble()):
            raise RankError(trouble)

    def end(self, trouble: str) -> None:
        """Of a process whose main thread waits for nothing."""
        self.fail(RankError(trouble), apart=True)
        print(f"grpo-fast: {self.beat()} cannot go on and ends: {trouble}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def cause(beats: Sequence[Beat]) -> str | None:
    """What happened to ranks that failed or are gone, those first that did not only hear of another's."""
    first = [beat for beat in beats if not beat.heard] or beats
    return "; ".join(beat.failure or f"{beat} is gone" for beat in first) or None


def go_on() -> str:
    """How a run that has lost a rank continues."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if int(count) < int(most):
        return "torchrun starts the ranks again, from the newest checkpoint"
    return "continue from the newest checkpoint with --resume"
