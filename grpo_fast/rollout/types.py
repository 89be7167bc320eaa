"""The one protocol between the trainer and whatever generates, and what they exchange."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from grpo_fast.policy import Policy

REPORT_SECONDS = 0.1  # at least, between two reports of progress


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `temperature=0` is greedy.

    Raises:
        ValueError: for the first value outside its range.
    """

    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("max_completion_length", self.max_completion_length >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("stop", all(self.stop), "a tuple of non-empty strings"),
        )
        for name, valid, expected in rules:
            if not valid:
                raise ValueError(f"Sampling.{name} = {getattr(self, name)!r} must be {expected}")


@dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    token_ids: tuple[int, ...]  # the end token included when one was drawn
    logprobs: tuple[float, ...]  # of each token under the distribution it was drawn from
    text: str  # decoded, special tokens removed
    truncated: bool  # stopped by max_completion_length


class RolloutObserver(Protocol):
    """Told of a rollout while it runs, from the thread that called `generate`."""

    def group_done(self, index: int, completions: list[Completion]) -> None:
        """Every completion of prompt `index` has ended; others may still decode."""
        ...

    def progress(self, tokens: int, finished: int, total: int) -> None:
        """Tokens decoded so far, and how many of the `total` completions have ended."""
        ...


class Engine(Protocol):
    """Generates completions; frees its memory while the trainer works.

    The cycle of a step is `generate`, `sleep`, the update, `sync`, `wake`. An engine that dropped its
    weights takes memory for them in `sync` and for everything else in `wake`, so that the trainer's can be
    freed in between.
    """

    name: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each tokenised prompt, in the order of the prompts.

        Raises:
            RuntimeError: the engine sleeps.
        """
        ...

    def sleep(self) -> None:
        """Free the memory; does nothing when asleep."""
        ...

    def sync(self, policy: Policy) -> None:
        """Take over the policy's current weights, asleep or awake; nothing cached from older ones is kept."""
        ...

    def wake(self) -> None:
        """Be ready to generate; does nothing when awake.

        Raises:
            RuntimeError: the weights were dropped and not synced since.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by part."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...


def check_prompts(prompts: Sequence[Sequence[int]], n: int) -> None:
    """Raises ValueError for a prompt without tokens, or `n` below 1."""
    if n < 1:
        raise ValueError(f"n = {n} must be at least 1")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{index}] has no tokens; a prompt needs at least one")


class Collector:
    """Completions as they end, in whatever order, into groups in the order of the prompts."""

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
