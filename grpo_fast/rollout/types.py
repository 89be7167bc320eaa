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


class Engine(Protocol):
    """Generates completions; gives its memory away while the trainer works."""

    name: str

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling
    ) -> list[list[Completion]]:
        """`n` completions for each tokenised prompt, in the order of the prompts."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def sync(self, policy: Policy) -> None:
        """Take over the policy's current weights."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes held, by part."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...
