"""Make, reuse and close the instances of an environment."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from grpo_fast.rewards.calls import event_loop

logger = logging.getLogger(__name__)
CLOSING = 10.0  # seconds that an async instance may take to close


class Instances:
    """Reuse an environment's instances, as TRL does: make one if all are in use, reset it per completion."""

    def __init__(self, factory: Callable[[], Any], first: Any) -> None:
        self.factory = factory
        self._made, self._usable, self._free = [first], [first], [first]
        self.close = weakref.finalize(self, _close, self._made)

    def begin(self) -> None:
        """Free all instances, whose completions are scored."""
        self._free = list(self._usable)

    def take(self) -> Any:
        """Take a free instance; None if there is none."""
        return self._free.pop(0) if self._free else None

    def add(self, environment: Any) -> None:
        self._made.append(environment)
        self._usable.append(environment)

    def check_reset(self, columns: Iterable[str]) -> None:
        """Raise ValueError if `reset` does not take the columns of a row, including the prompt."""
        try:
            signature = inspect.signature(self._made[0].reset)
        except ValueError:  # a builtin has no signature
            return
        try:
            signature.bind(**dict.fromkeys(columns))
        except TypeError as problem:
            named = f"{type(self._made[0]).__name__}.reset does not fit the dataset: {problem}"
            remedy = "rename one (dataset.rename), give an argument a default, or add **row"
            known = ", ".join(sorted(columns))
            raise ValueError(f"{named}. Its columns are {known}: {remedy}") from problem

    def drop(self, environment: Any) -> None:
        """Stop using an instance, because a call that timed out still runs on it."""
        self._usable = [other for other in self._usable if other is not environment]


def _close(environments: Iterable[Any]) -> None:
    """Exit instances that are context managers; of others, close the context managers in their attributes.

    These are, for example, OpenEnv's clients, which hold sessions of a server.
    """

    def managed(value: Any) -> bool:
        return hasattr(value, "__exit__") or hasattr(value, "__aexit__")

    async def ended(work: Any) -> Any:
        return await asyncio.wait_for(work, CLOSING)

    for environment in environments:
        ends: list[Callable[[], Any]] = []
        if managed(environment):
            leave = getattr(environment, "__exit__", None) or environment.__aexit__
            ends.append(partial(leave, None, None, None))
        else:
            held = getattr(environment, "__dict__", {}).values()
            ends += [value.close for value in held if managed(value) and hasattr(value, "close")]
        for end in ends:
            try:
                if inspect.isawaitable(work := end()):
                    closing = asyncio.run_coroutine_threadsafe(ended(work), event_loop("environments"))
                    if asyncio._get_running_loop() is None:  # waiting on the loop itself would deadlock
                        closing.result()
            except Exception as error:  # of the user's class, or of a lost server
                logger.warning("an instance of %s cannot be closed: %r", type(environment).__name__, error)
