"""The one protocol between the trainer and whatever generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from grpo_fast.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `temperature=0` is greedy."""

    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


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
    """Generates completions; gives its memory away while the trainer works.

    The cycle of a step is `generate`, `sleep`, the update, `sync`, `wake`. An engine that dropped its
    weights takes memory for them in `sync` and for everything else in `wake`, so that the trainer can
    leave the device in between.
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
        """Give the memory away; does nothing when asleep."""
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
