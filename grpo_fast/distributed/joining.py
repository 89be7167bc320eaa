"""How ranks meet: each comes to one store, says whom it waits for, and hears of one that will not come.

torchrun ends all ranks where one fails; those that something else has started have only each other.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a mistake in a configuration is told before torch is imported
    from torch.distributed import Store

WORD = 10.0  # seconds of waiting from one word about it to the next
FAREWELL = 15.0  # seconds in which the others hear of a failure
KEY = "grpo_fast/rank/{}"  # of a rank that has come: what it tells of itself
FAILED, HEARD = "grpo_fast/joining/failed", "grpo_fast/joining/heard"  # an error, and how many know of it
_SINGLE_PROCESS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}  # what torchrun would set


class RankError(RuntimeError):
    """Another rank has failed, is lost, or is at another place."""


def numbers() -> tuple[int, int, int]:
    """How many ranks there are, which of them this process is, and which of its host's."""
    size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in _SINGLE_PROCESS.items())
    return size, rank, local_rank


def launched() -> bool:
    """Whether torchrun watches over this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def awaited() -> Iterator[None]:
    """What this rank does before it joins the others; an error is theirs, too, so that they do not wait."""
    try:
        yield
    except Exception as error:
        if numbers()[0] > 1 and not launched():
            with suppress(Exception):  # which would hide the error
                _excuse(f"{_named()} failed before it joined: {type(error).__name__}: {error}")
        raise


def connect(timeout: timedelta) -> Store:
    """The store of all ranks, which rank 0 or torchrun keeps.

    Raises:
        ValueError: nothing says where it is.
        RankError: it does not appear.
    """
    from torch.distributed import TCPStore

    place = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if not all(place):
        raise ValueError(
            f"WORLD_SIZE = {numbers()[0]} without MASTER_ADDR and MASTER_PORT: start the ranks with "
            "torchrun, or set both to where rank 0 can be reached"
        )
    host, port = str(place[0]), int(str(place[1]))
    keeps = numbers()[1] == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def answers() -> bool:
        with suppress(OSError), socket.create_connection((host, port), timeout=WORD):
            return True
        return False

    if not keeps:
        _wait(answers, lambda: f"rank 0 at {host}:{port}", timeout)
    return TCPStore(host, port, None, keeps, timeout, wait_for_workers=False, multi_tenant=True)


def of_attempt(store: Store) -> Store:
    """The store outlives the ranks: those that torchrun starts again must not find what these have left."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{numbers()[0]}", store)


def meet(store: Store, timeout: timedelta) -> None:
    """Wait until all ranks are there.

    Raises:
        RankError: one failed before, or does not come.
    """
    keys = [KEY.format(rank) for rank in range(numbers()[0])]

    def met() -> bool:
        if store.check([FAILED]):
            problem = store.get(FAILED).decode()
            store.add(HEARD, 1)
            raise RankError(problem)
        return store.check(keys)

    def missing() -> str:
        return "rank " + ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))

    _wait(met, missing, timeout)


def _excuse(problem: str) -> None:
    size, rank, _ = numbers()
    store = of_attempt(connect(timedelta(seconds=FAREWELL)))
    store.set(FAILED, problem)
    store.add(HEARD, 1)
    end = time.monotonic() + FAREWELL
    while rank == 0 and time.monotonic() < end and store.add(HEARD, 0) < size:
        time.sleep(0.1)  # the store goes with its process


def _wait(done: Callable[[], bool], whom: Callable[[], str], timeout: timedelta) -> None:
    start, words = time.monotonic(), 1
    while not done():
        waited = time.monotonic() - start
        if waited > timeout.total_seconds():
            raise RankError(f"{_named()} has waited {waited:.0f} s for {whom()} to join: look there for why")
        if waited > WORD * words:
            words += 1
            print(f"grpo-fast: {_named()} has waited {waited:.0f} s for {whom()} to join", file=sys.stderr)
        time.sleep(0.1)


def _named() -> str:
    return f"rank {numbers()[1]} (process {os.getpid()} on host {socket.gethostname()})"
