"""Calls that cannot hold up the run: plain functions in threads, async ones on one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from grpo_fast.rewards.types import RewardFunction


class CallFailed(Exception):
    """A call that gave no usable values. `sample`: which completion is to blame, where known."""

    def __init__(self, problem: str, sample: int | None = None) -> None:
        super().__init__(problem)
        self.sample = sample


class Raised(CallFailed):
    """The function raised an exception, the `__cause__`."""


@dataclass(frozen=True)
class Call:
    """A function at work."""

    name: str
    future: Future[Any]
    timeout: float
    deadline: float  # on time.monotonic


class Runner:
    """Starts calls, and waits for each no longer than it may take.

    A thread cannot be killed: a function that hangs keeps its (daemon) thread until it returns or the process
    ends. Nor does a time limit reach C code that holds the interpreter lock, such as a regular expression
    that backtracks for ever; such work belongs in a process of its own.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy: dict[str, Future[Any]] = {}  # functions whose abandoned call may hold a thread

    def start(
        self, name: str, function: RewardFunction, arguments: Mapping[str, Any], timeout: float
    ) -> Call:
        """Calls the function in the background; `timeout` seconds count from now."""
        if name in self._busy and not self._busy[name].done():  # one thread a function is enough to lose
            future: Future[Any] = Future()
            future.set_exception(CallFailed("has not returned from an earlier call yet"))
        elif is_async(function):
            future = asyncio.run_coroutine_threadsafe(function(**arguments), self._event_loop())
        else:
            future = _in_thread(lambda: function(**arguments))
        return Call(name, future, timeout, time.monotonic() + timeout)

    def finish(self, call: Call) -> Any:
        """What the function returned.

        Raises:
            Raised: it raised.
            CallFailed: it has not returned in time.
        """
        if not wait([call.future], max(0.0, call.deadline - time.monotonic())).done:
            self._busy[call.name], reason = self._abandon(call)
            raise CallFailed(f"did not return within its timeout of {call.timeout:g} seconds{reason}")
        error = call.future.exception()
        if isinstance(error, CallFailed):
            raise error
        if error is not None:
            raise Raised(f"raised {type(error).__name__}: {error}") from error
        return call.future.result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        # One loop for all calls: clients that functions keep between calls are bound to it.
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
            weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)
        return self._loop

    def _abandon(self, call: Call) -> tuple[Future[Any], str]:
        """What is done once the call holds no thread any more, and why it may still hold one."""
        if not call.future.cancel():
            return call.future, ""
        # A cancelled coroutine ends when it awaits; the loop answers unless some function never does.
        answer = asyncio.run_coroutine_threadsafe(_nothing(), self._event_loop())
        if wait([answer], 1.0).done:
            return answer, ""
        return answer, "; an async reward blocks the event loop: let it await, or make it a plain function"


def is_async(function: RewardFunction) -> bool:
    """Whether calling gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_values(returned: Any, n: int) -> list[float]:
    """N floats, NaN for None.

    Raises:
        CallFailed: not a list, of another length, or with something else in it; with its index.
    """
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise CallFailed(f"must return a list of {n} numbers, got {type(returned).__name__}")
    if len(returned) != n:
        raise CallFailed(f"returned {len(returned)} values for {n} completions; return one each")
    return [_number(value, index) for index, value in enumerate(returned)]


def _number(value: Any, index: int) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise CallFailed(
            f"returned {value!r} for sample {index}; a value is a finite number, or None where the reward "
            "does not apply",
            index,
        )
    return float(value)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also SystemExit, which would end the thread and leave the call open
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="reward", daemon=True).start()
    return future


async def _nothing() -> None:
    pass
