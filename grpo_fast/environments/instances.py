"""The instances of an environment: made when needed, reset for each completion, closed in the end."""

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
CLOSING = 10.0  # seconds that an async instance has for it


class Instances:
    """An environment's instances, as TRL has them: made where all others play, reset for each completion.

    What they hold is closed when nobody needs them any more.
    """

    def __init__(self, factory: Callable[[], Any], first: Any) -> None:
        self.factory = factory
        self._made, self._usable, self._free = [first], [first], [first]
        self.close = weakref.finalize(self, _close, self._made)

    def begin(self) -> None:
        """All are free again: what they played before is scored."""
        self._free = list(self._usable)

    def take(self) -> Any:
        """A free one; None where one is to be made."""
        return self._free.pop(0) if self._free else None

    def add(self, environment: Any) -> None:
        """One that was made, and is taken."""
        self._made.append(environment)
        self._usable.append(environment)

    def check_reset(self, columns: Iterable[str]) -> None:
        """Whether `reset` fits the columns of a row, the prompt's among them.

        Raises:
            ValueError: it asks for one that is not there, or does not take one that is.
        """
        try:
            signature = inspect.signature(self._made[0].reset)
        except ValueError:  # not of Python
            return
        try:
            signature.bind(**dict.fromkeys(columns))
        except TypeError as problem:
            named = ", ".join(sorted(columns))
            raise ValueError(
                f"{type(self._made[0]).__name__}.reset does not fit the dataset: {problem}. Its columns are "
                f"{named}: rename one (dataset.rename), give an argument a default, or add **row"
            ) from problem

    def drop(self, environment: Any) -> None:
        """One that a call still works on, which was given up: it plays no more."""
        self._usable = [other for other in self._usable if other is not environment]


def _close(environments: Iterable[Any]) -> None:
    """Leave each that is a context manager; of others, close the context managers that they hold.

    So OpenEnv's clients are closed, whose connections hold sessions of the server.
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
                    if asyncio._get_running_loop() is None:  # the loop itself does not wait for itself
                        closing.result()
            except Exception as error:  # of the user's class, or of a server that has gone
                logger.warning("an instance of %s cannot be closed: %r", type(environment).__name__, error)
