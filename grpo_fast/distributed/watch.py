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
from pathlib import Path
from typing import Any, cast

import psutil
from torch.distributed import Store

from grpo_fast.distributed.joining import KEY, RankError

BEAT = 1.0  # seconds from one sign of life to the next
GRACE = 15.0  # seconds for the main thread to leave by itself
COLLECTIVE = re.compile("gloo|nccl|pair closure", re.IGNORECASE)  # in its RuntimeErrors


@dataclass
class Beat:
    """What a rank tells of itself; times are of its own clock."""

    rank: int
    host: str
    process: int
    node: str | None  # whose processes see each other
    sent: float = 0.0
    place: str | None = None
    entered: float = 0.0
    exchanges: int = 0  # of all ranks that it has finished
    failure: str | None = None  # in the exchange that comes next, or for good
    heard: bool = False  # the failure is that of another rank
    apart: bool = False  # for good: it takes part in no exchange any more
    sees: Sequence[int] = ()  # ranks of its node whose processes run

    def __str__(self) -> str:
        where = f", {self.sent - self.entered:.0f} s at {self.place}" if self.place else ""
        return f"rank {self.rank} (process {self.process} on host {self.host}{where})"

    def runs(self, node: str | None) -> bool | None:
        """Whether the process, if one of this node, is there: it may be busy, or stopped for a while."""
        if node is None or node != self.node:
            return None
        try:
            return psutil.Process(self.process).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class Watch:
    """Watches the other ranks for one rank; a context, entered by its main thread when all have joined.

    Args:
        store: of all ranks.
        timeout: seconds without a sign of life after which a rank that no one sees is lost.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.timeout = timeout
        self.store: Store = cast("Any", store).clone()  # a connection of its own
        self.store.set_timeout(timedelta(seconds=timeout))
        self.own = Beat(rank, socket.gethostname(), os.getpid(), node())
        self.keys = [KEY.format(other) for other in range(size) if other != rank]
        self.others: dict[int, tuple[float, Beat]] = {}  # and when each was heard
        self.silent: set[int] = set()  # heard nothing of for too long
        self.working = False  # the main thread may be called away
        self.agreed: BaseException | None = None  # the error that all ranks know of
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
        self.stop()
        signal.signal(signal.SIGURG, self.handler)

    def stop(self) -> None:
        self.left.set()
        self.thread.join()

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Where this rank is, for messages. An error that leaves it is told to the others.

        Raises:
            RankError: in the stead of a collective's error; at once where a rank is lost.
        """
        own = self.own
        outer = own.place, own.entered, self.working
        own.place, own.entered, self.working = place, time.monotonic(), False
        self.tell()
        try:
            if self.lost or own.apart:
                raise RankError(self.lost or f"the ranks are apart: {own.failure}")
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
        """What the main thread is called away from; raises RankError where the work is for nothing."""
        outer, self.working = self.working, True
        try:
            self.called_away()
            yield
        finally:
            self.working = outer

    def finished(self) -> None:
        """An exchange of all ranks; what failed in it they know."""
        self.own.failure, self.own.heard = None, False
        self.own.exchanges += 1

    def explained(self, error: BaseException) -> BaseException:
        """A collective's error as one that says whose fault it is; any other as it is."""
        ours = isinstance(error, RankError) or not isinstance(error, RuntimeError)
        if ours or not COLLECTIVE.search(str(error)):
            return error
        now = time.monotonic()  # each other rank is heard once more, or is lost
        while not self.trouble() and any(heard < now + BEAT for heard, _ in self.others.values()):
            time.sleep(BEAT / 10)
        others = ", ".join(str(beat) for _, beat in self.others.values())
        self.tell()
        return RankError(self.trouble() or f"{self.own} was left waiting by {others}: {error}; {go_on()}")

    def fail(self, error: BaseException, *, apart: bool = False) -> str:
        """Tell the others; returns what they hear."""
        own = self.own
        who = f"rank {own.rank} (process {own.process} on host {own.host})"
        heard, text = isinstance(error, RankError), f"{type(error).__name__}: {error}"
        text = str(error) if heard else f"{who} failed at {own.place}: {text}"
        if not own.apart:  # what follows a failure is not told in its stead
            own.failure, own.heard, own.apart = text, heard, apart
            self.tell()
        return text

    def trouble(self) -> str | None:
        """Why this rank's work is for nothing: a rank is lost, or has failed in an exchange yet to come."""
        beats = [beat for _, beat in self.others.values()]
        return self.lost or self.cause([b for b in beats if b.failure and b.exchanges >= self.own.exchanges])

    def tell(self) -> None:
        self.own.sent = time.monotonic()
        with suppress(RuntimeError):  # `hear` says that the store is gone
            self.store.set(KEY.format(self.own.rank), json.dumps(asdict(self.own)))

    def hear(self) -> None:
        now = time.monotonic()
        beats = [Beat(**json.loads(text)) for text in self.store.multi_get(self.keys)]
        runs = {beat.rank: beat.runs(self.own.node) for beat in beats}
        self.own.sees = [rank for rank, there in runs.items() if there]
        signs = {*self.own.sees}
        for beat in beats:
            if beat.rank not in self.others or self.others[beat.rank][1].sent != beat.sent:
                signs |= {beat.rank, *beat.sees}
        self.others = {b.rank: (now if b.rank in signs else self.others[b.rank][0], b) for b in beats}
        self.silent = {rank for rank, (heard, _) in self.others.items() if now - heard > self.timeout}
        away = [b for b in beats if b.apart or runs[b.rank] is False or b.rank in self.silent]
        self.lost = f"{self.cause(away)}; {go_on()}" if away else None

    def cause(self, beats: Sequence[Beat]) -> str | None:
        """What happened to ranks that failed or are gone, those first that did not only hear of another's."""
        first = [beat for beat in beats if not beat.heard] or beats
        return "; ".join(map(self.fate, first)) or None

    def fate(self, beat: Beat) -> str:
        if beat.failure:
            return beat.failure
        if beat.rank in self.silent:
            remedy = "raise distributed.heartbeat_timeout where it was only slow"
            return f"{beat} has given no sign of life for {self.timeout:.0f} s ({remedy})"
        return f"{beat} is gone"

    def run(self) -> None:
        """The thread's work: tell and hear, and end the process where its main thread stays."""
        since: float | None = None
        while not self.left.wait(BEAT):
            try:
                self.tell()
                self.hear()
            except RuntimeError as error:
                self.lost = f"the store of the ranks does not answer, its process is gone: {error}; {go_on()}"
            trouble = self.trouble() if self.own.place else None
            if trouble is None:
                since = None
            elif since is None:
                since = time.monotonic()
                signal.pthread_kill(self.main, signal.SIGURG)
            elif time.monotonic() - since > GRACE:  # the main thread waits for nothing
                print(f"grpo-fast: {self.own} cannot go on and ends: {trouble}", file=sys.stderr, flush=True)
                self.fail(RankError(trouble), apart=True)
                sys.stdout.flush()
                os._exit(1)

    def called_away(self, *_: object) -> None:
        """The main thread, wherever it is in Python."""
        if self.working and (trouble := self.trouble()):
            raise RankError(trouble)


def node() -> str | None:
    """The same for two processes only where they see each other's; None where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def go_on() -> str:
    """How a run that has lost a rank continues."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if int(count) < int(most):
        return "torchrun starts the ranks again, from the newest checkpoint"
    return "continue from the newest checkpoint with --resume"
