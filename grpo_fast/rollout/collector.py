"""Completions as they end, in whatever order, into groups in the order of the prompts."""

from __future__ import annotations

import time
from typing import cast

from grpo_fast.rollout.types import Completion, RolloutObserver

REPORT_SECONDS = 0.1  # at least, between two reports of progress


class Collector:
    """Where an engine puts what it has drawn; the observer, if any, hears of it."""

    def __init__(self, prompts: int, n: int, observer: RolloutObserver | None = None) -> None:
        self.finished = 0
        self.tokens = 0  # of the completions that have ended
        self.total = prompts * n
        self._groups: list[list[Completion | None]] = [[None] * n for _ in range(prompts)]
        self._missing = [n] * prompts
        self._observer = observer
        self._reported = time.monotonic()

    def add(self, prompt: int, number: int, completion: Completion) -> None:
        """Completion `number` of `prompt` has ended."""
        self._groups[prompt][number] = completion
        self._missing[prompt] -= 1
        self.finished += 1
        self.tokens += len(completion.token_ids)
        if self._observer is not None and not self._missing[prompt]:
            self._observer.group_done(prompt, self._group(prompt))

    @property
    def report_due(self) -> bool:
        """Whether `report` would reach anybody now."""
        if self._observer is None:
            return False
        return self.finished == self.total or time.monotonic() - self._reported >= REPORT_SECONDS

    def report(self, decoding: int) -> None:
        """`decoding` tokens belong to completions that still go on; told now and then, and at the end."""
        if self._observer is not None and self.report_due:
            self._reported = time.monotonic()
            self._observer.progress(self.tokens + decoding, self.finished, self.total)

    def groups(self) -> list[list[Completion]]:
        """Everything; complete once `finished` is `total`."""
        return [self._group(prompt) for prompt in range(len(self._groups))]

    def _group(self, prompt: int) -> list[Completion]:
        return cast("list[Completion]", list(self._groups[prompt]))
