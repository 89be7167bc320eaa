"""Completions asked for one by one, from other threads, while an engine is awake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from grpo_fast.rollout.types import Completion, Sampling

GATHER_SECONDS = 0.02  # how long clients of an unknown number may take to ask together
OVER = "the engine serves no more requests: the rollout is over"


@dataclass(frozen=True, eq=False)
class Request:
    """One completion that somebody waits for."""

    token_ids: tuple[int, ...]  # what it continues
    sampling: Sampling
    answer: Future[Completion] = field(default_factory=Future)


class Requests:
    """What stands between those who ask and the one engine that serves them.

    Args:
        clients: those who ask, each one thing after another, and `leave` when they are through; None: nobody
            knows, and whoever made this closes it.
        on_progress: told, in the thread of the engine, of the tokens decoded so far.
    """

    def __init__(self, clients: int | None = None, on_progress: Callable[[int], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._clients = clients
        self._waiting: list[Request] = []  # for the engine to take
        self._serving: set[Request] = set()  # taken and not answered
        self._closed = False
        self._error: BaseException | None = None
        self._on_progress = on_progress
        self._tokens = 0  # of answers given

    def ask(self, token_ids: Sequence[int], sampling: Sampling) -> Future[Completion]:
        """The completion of `token_ids`, once it is drawn. From any thread.

        Raises:
            RuntimeError: closed.
        """
        request = Request(tuple(token_ids), sampling)
        with self._changed:
            if self._closed:
                raise RuntimeError(OVER)
            self._waiting.append(request)
            self._changed.notify_all()
        return request.answer

    def leave(self) -> None:
        """A client asks for nothing more."""
        with self._changed:
            if self._clients is not None:
                self._clients -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the rollout by an error, which the engine's next `take` or `report` raises."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is served, and who still waits gets a RuntimeError. An engine does it at its end."""
        with self._changed:
            self._closed = True
            self._start()
            dropped, self._serving = self._serving, set()
            self._changed.notify_all()
        for request in dropped:
            request.answer.set_exception(RuntimeError(OVER))

    def take(self, wait: Literal["none", "any", "all"]) -> list[Request] | None:
        """For the engine: what is asked and not taken yet; None once nothing more will be.

        Args:
            wait: for nothing; for one request; or for those of all clients that are about to ask, so that
                what is computed together does not depend on how long anybody took.
        """
        with self._changed:
            while self._error is None and not self._over and not self._enough(wait):
                self._changed.wait()
            if wait == "all" and self._clients is None:
                self._changed.wait_for(lambda: self._over or self._error is not None, GATHER_SECONDS)
            if self._error is not None:
                raise self._error
            return None if self._over else self._start()

    def give(self, request: Request, answer: Completion | Exception) -> None:
        """For the engine: a request's answer, or why there is none. Once closed, nobody waits for it."""
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

    def report(self, decoding: int) -> None:
        """For the engine: `decoding` tokens belong to answers that it still draws."""
        if self._error is not None:
            raise self._error
        if self._on_progress is not None:
            self._on_progress(self._tokens + decoding)

    @property
    def closed(self) -> bool:
        """Whether nobody wants anything any more, not even what is being drawn."""
        return self._closed

    def _start(self) -> list[Request]:
        """What waited and was not given up by who asked is the engine's now."""
        taken = [request for request in self._waiting if request.answer.set_running_or_notify_cancel()]
        self._waiting = []
        self._serving.update(taken)
        return taken

    @property
    def _over(self) -> bool:
        done = self._clients is not None and self._clients <= 0
        return self._closed or (done and not self._waiting and not self._serving)

    def _enough(self, wait: str) -> bool:
        if wait == "all" and self._clients is not None:
            return len(self._waiting) + len(self._serving) >= self._clients
        return wait == "none" or bool(self._waiting)
