"""Call user functions with a timeout: plain functions in threads, async ones on one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import numbers
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from grpo_fast.config.lookup import raised_at

if TYPE_CHECKING:
    from grpo_fast.rewards.types import RewardFunction

LARGEST_REWARD = 1e12  # times the largest weight, its square is still finite in float32


class CallFailed(Exception):
    """A call without usable values, `sample` being the index of the bad one, if known.

    `__cause__` is the function's own error, if it raised one.
    """

    def __init__(self, problem: str, sample: int | None = None) -> None:
        super().__init__(problem)
        self.sample = sample


class Runner:
    """Start calls, and wait for each until its timeout.

    A thread cannot be killed: a function that hangs keeps its daemon thread. No timeout interrupts C code
    that holds the GIL, such as a pattern of `re` that backtracks; built-in rewards match by
    `config.patterns`.
    """

    def __init__(self) -> None:
        self._busy: dict[str, Future[Any]] = {}  # calls that timed out and may still hold a thread

    def start(
        self, name: str, function: RewardFunction, arguments: Mapping[str, Any], timeout: float | None
    ) -> Callable[[], Any]:
        """Call the function in the background; the returned one waits for its value, or raises CallFailed.

        `timeout` seconds count from now; None is no limit.
        """
        started = time.monotonic()
        if name in self._busy and not self._busy[name].done():  # lose at most one thread per function
            future: Future[Any] = Future()
            future.set_exception(CallFailed("has not returned from an earlier call yet"))
        elif is_async(function):
            future = asyncio.run_coroutine_threadsafe(function(**arguments), event_loop("rewards"))
        else:
            future = in_thread(lambda: function(**arguments))

        def finish() -> Any:
            left = None if timeout is None else max(0.0, started + timeout - time.monotonic())
            if not wait([future], left).done:
                self._busy[name] = future
                future.cancel()  # a coroutine ends when it awaits
                limit = f"its timeout of {timeout:g} seconds"
                raise CallFailed(f"did not return within {limit}; raise it in rewards")
            error = future.exception()
            if error is None:
                return future.result()
            if isinstance(error, CallFailed):
                raise error
            raise CallFailed(f"raised {type(error).__name__}: {error}{raised_at(error)}") from error

        return finish


@cache
def event_loop(of: str) -> asyncio.AbstractEventLoop:
    """Return the loop of all async functions of a kind: their clients are bound to one loop."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit):  # the coroutine's future has it, too
                loop.run_forever()

    threading.Thread(target=run, name=f"async {of}", daemon=True).start()
    return loop


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_scores(returned: Any, n: int) -> list[float]:
    """Return n floats, NaN for None; raise CallFailed for anything but n finite numbers or None."""
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise CallFailed(f"must return a list of {n} numbers, got {type(returned).__name__}")
    if len(returned) != n:
        raise CallFailed(f"returned {len(returned)} values for {n} completions; return one each")
    # A scalar of numpy or torch has an item.
    values = [value.item() if hasattr(value, "item") else value for value in returned]
    for index, value in enumerate(values):
        if value is not None and not (
            isinstance(value, numbers.Real) and abs(cast(float, value)) <= LARGEST_REWARD
        ):
            allowed = f"a finite number of at most {LARGEST_REWARD:g} in size, or None"
            raise CallFailed(f"returned {value!r} for sample {index}; return {allowed}", index)
    return [math.nan if value is None else float(value) for value in values]


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a daemon thread, which the process does not wait for at its end."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also SystemExit, which would end the thread and leave the call open
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="reward", daemon=True).start()
    return future
