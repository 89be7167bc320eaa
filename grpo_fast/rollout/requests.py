"""Completions that clients in other threads request one by one while an engine is awake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from grpo_fast.rollout.types import Completion, Sampling

OVER = "the engine serves no more requests: the rollout is over"


@dataclass(frozen=True, eq=False)
class Request:
    """A completion that a client waits for."""

    token_ids: tuple[int, ...]  # the prompt
    sampling: Sampling
    answer: Future[Completion] = field(default_factory=Future)


class Requests:
    """The queue between clients in any thread and the engine that serves them.

    Args:
        clients: their number. Each has one open request at a time, and calls `leave` at its end.
        on_progress: called in the engine's thread with a function that counts the decoded tokens.

    Attributes:
        closed: no request is served any more.
    """

    def __init__(self, clients: int, on_progress: Callable[[Callable[[], int]], None] | None = None) -> None:
        self.closed = False
        self._changed = threading.Condition()
        self._clients = clients
        self._waiting: list[Request] = []  # not taken by the engine
        self._serving: set[Request] = set()  # taken and not answered
        self._error: BaseException | None = None
        self._on_progress = on_progress
        self._tokens = 0  # of all answers

    def ask(self, token_ids: Sequence[int], sampling: Sampling) -> Future[Completion]:
        """Request the completion of a prompt, from any thread. Raises RuntimeError once closed."""
        request = Request(tuple(token_ids), sampling)
        with self._changed:
            if self.closed:
                raise RuntimeError(OVER)
            self._waiting.append(request)
            self._changed.notify_all()
        return request.answer

    def leave(self) -> None:
        """Sign off one client."""
        with self._changed:
            self._clients -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have the engine's next `take` or `report` raise this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving; waiting clients get a RuntimeError. The engine calls it at its end."""
        with self._changed:
            self.closed = True
            self._start()
            dropped, self._serving = self._serving, set()
            self._changed.notify_all()
        for request in dropped:
            request.answer.set_exception(RuntimeError(OVER))

    def take(self, wait: Literal["none", "any", "all"]) -> list[Request] | None:
        """Return the requests that the engine has not taken yet; None once there will be no more.

        Args:
            wait: for nothing; for one request; or for one of every client that is not waiting for an answer,
                so that batches do not depend on how long clients take.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._over or self._enough(wait))
            if self._error is not None:
                raise self._error
            return None if self._over else self._start()

    def give(self, request: Request, answer: Completion | Exception) -> None:
        """Answer a request, from the engine; ignored once closed."""
        with self._changed:
            if request not in self._serving:
                return
            self._serving.remove(request)
            self._tokens += len(answer.token_ids) if isinstance(answer, Completion) else 0
            self._changed.notify_all()
        if isinstance(answer, Completion):
            request.answer.set_result(answer)
        else:
            request.answer.set_exception(answer)

    def report(self, decoding: Callable[[], int]) -> None:
        """Report progress, from the engine; `decoding` counts the tokens of unfinished answers."""
        if self._error is not None:
            raise self._error
        if self._on_progress is not None:
            self._on_progress(lambda: self._tokens + decoding())

    def _start(self) -> list[Request]:
        """Hand the waiting requests to the engine, without those that clients have cancelled."""
        taken = [request for request in self._waiting if request.answer.set_running_or_notify_cancel()]
        self._waiting = []
        self._serving.update(taken)
        return taken

    @property
    def _over(self) -> bool:
        return self.closed or (self._clients <= 0 and not self._waiting and not self._serving)

    def _enough(self, wait: str) -> bool:
        if wait == "all":
            return len(self._waiting) + len(self._serving) >= self._clients
        return wait == "none" or bool(self._waiting)
