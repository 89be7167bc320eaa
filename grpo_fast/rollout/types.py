"""The protocol between the trainer and rollout engines, and the types that they exchange."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_fast.config.section import EXACT, Count, Fraction, NotNegative, PositiveInt

if TYPE_CHECKING:
    from grpo_fast.data.types import Message, Prompt
    from grpo_fast.policy import Policy
    from grpo_fast.rollout.requests import Requests

PromptTokens = Sequence[Sequence[int]]  # tokenized

REPORT_SECONDS = 0.1  # between two progress reports, at least


@dataclass(frozen=True, config=EXACT)
class Sampling:
    """Sampling parameters. Raises ValueError for values outside their ranges."""

    max_completion_length: PositiveInt
    temperature: NotNegative = 1.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0  # 0: no limit
    min_p: Fraction = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: int | None = None
    logprobs: bool = True  # False: not needed; an engine may still return them


@dataclasses.dataclass(frozen=True)
class Episode:
    """The fields of a multi-turn completion besides its tokens."""

    prompt: str | list[Message]  # with the first observation of the environment
    prompt_ids: tuple[int, ...]
    sampled: tuple[bool, ...]  # for each token after the prompt; False: written by the environment
    messages: tuple[Message, ...]  # after the prompt
    environment: Any = None  # the instance, until rewards are computed
    tool_calls: int = 0
    tool_failures: int = 0  # calls that raised, timed out, or named an unknown tool
    tools_given_up: int = 0  # calls that timed out
    environment_seconds: float = 0.0  # total time of its calls
    reward: float | None = None  # from the environment's `get_reward`

    @property
    def turns(self) -> int:
        """Return the number of assistant messages."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    token_ids: tuple[int, ...]  # includes the end token if one was sampled
    logprobs: tuple[float, ...] | None  # under the sampling distribution; None: not requested
    text: str  # from `completion_texts`: without end tokens and chat template tokens
    truncated: bool  # stopped by a limit on tokens, turns or calls
    episode: Episode | None = None  # if multi-turn; tokens of the environment have logprob 0
    # Per-token values of a custom rollout by name. A custom loss reads them from its inputs.
    columns: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    # (t, L, k) integers with rollout.router_replay: the experts that each of L layers chose for the first t
    # tokens of prompt and completion. The last token's are never known.
    experts: np.ndarray[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the model wrote."""
        return len(self.token_ids) if self.episode is None else sum(self.episode.sampled)

    def without_environment(self) -> Completion:
        """Return the completion as it is kept and sent to other ranks, after its rewards are computed."""
        episode = self.episode and dataclasses.replace(self.episode, environment=None)
        return dataclasses.replace(self, episode=episode, experts=None)


def as_asked(prompt: Prompt, completion: Completion) -> Prompt:
    """Return the prompt that this completion answers, with the first observation of its environment."""
    if (episode := completion.episode) is None:
        return prompt
    return dataclasses.replace(prompt, prompt=episode.prompt, token_ids=episode.prompt_ids)


class RolloutObserver(Protocol):
    """Callbacks during a rollout, in the thread that called `generate`."""

    def group_done(self, index: int, completions: list[Completion]) -> None:
        """Handle the finished completions of prompt `index`; others may still decode."""
        ...

    def progress(self, tokens: int, finished: int, total: int) -> None:
        """Handle the tokens decoded so far, and the finished completions among `total`."""
        ...


class Engine(Protocol):
    """Generates completions; frees its memory while the trainer works.

    The cycle of a step is `generate`, `sleep`, the update, `sync`, `wake`. An engine that dropped its weights
    allocates them in `sync` and everything else in `wake`, so that the trainer can free memory in between.
    """

    name: str

    def generate(
        self, prompts: PromptTokens, n: int, sampling: Sampling, *, observer: RolloutObserver | None = None
    ) -> list[list[Completion]]:
        """Return `n` completions for each tokenized prompt, in the order of the prompts.

        The same `sampling.seed` gives the same tokens; the global random state is neither read nor changed.
        An engine that takes images has another argument `images`: `PromptImages | None` for each prompt.

        Raises:
            RuntimeError: the engine sleeps.
            ValueError: an empty prompt, `n` below 1, or no room for a completion.
            FloatingPointError: the weights hold NaN, or the logits where log-probabilities are returned.
        """
        ...

    def serve(self, requests: Requests) -> None:
        """Answer requests until no client is left; `generate` is not called meanwhile.

        An invalid request is answered with the ValueError of `generate`; the others go on.
        """
        ...

    def sleep(self) -> None:
        """Free the memory; does nothing while sleeping."""
        ...

    def sync(self, policy: Policy) -> None:
        """Take over the policy's weights, sleeping or awake, and drop caches computed with older ones.

        Raises:
            FloatingPointError: the weights hold NaN, where `generate` would not notice.
            ValueError: another policy than the engine was made with.
        """
        ...

    def wake(self) -> None:
        """Allocate what `sleep` freed; does nothing while awake.

        Raises:
            RuntimeError: the weights were dropped and not synced since, or memory is short.
        """
        ...

    def freed(self) -> int:
        """Return the bytes that `sync` and `wake` will allocate."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...


class Rollout(Protocol):
    """A function from prompts to completions, as `generate_rollout` or a multi-turn environment."""

    def __call__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions for each prompt, in the order of the prompts."""
        ...


def generate_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    *,
    observer: RolloutObserver | None = None,
) -> list[list[Completion]]:
    """Sample single-turn completions; a `Rollout`."""
    given: dict[str, Any] = {}
    if any(prompt.images for prompt in prompts):
        given["images"] = [prompt.images for prompt in prompts]
    return engine.generate([prompt.token_ids for prompt in prompts], n, sampling, observer=observer, **given)


def check_prompts(prompts: PromptTokens, n: int) -> None:
    """Raise ValueError for a prompt without tokens, or `n` below 1."""
    if n < 1:
        raise ValueError(f"n = {n} must be at least 1")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{index}] has no tokens; a prompt needs at least one")


class Collector:
    """Sorts completions that end in any order into groups in the order of the prompts."""

    def __init__(self, prompts: int, n: int, observer: RolloutObserver | None = None) -> None:
        self._finished = self._tokens = 0  # completions that have ended, and their tokens
        self._total = prompts * n
        self._groups: list[list[Any]] = [[None] * n for _ in range(prompts)]
        self._observer = observer
        self._reported = time.monotonic()

    def add(self, prompt: int, number: int, completion: Completion) -> None:
        """Add finished completion `number` of `prompt`."""
        group = self._groups[prompt]
        group[number] = completion
        self._finished += 1
        self._tokens += len(completion.token_ids)
        if self._observer is not None and None not in group:
            self._observer.group_done(prompt, group)

    def report(self, decoding: Callable[[], int]) -> None:
        """Report progress; `decoding` counts the tokens of unfinished completions."""
        self.progress(lambda: self._tokens + decoding())

    def progress(self, tokens: Callable[[], int]) -> None:
        """Report progress every `REPORT_SECONDS` and at the end; `tokens` counts all decoded tokens."""
        due = self._finished == self._total or time.monotonic() - self._reported >= REPORT_SECONDS
        if self._observer is not None and due:
            self._reported = time.monotonic()
            self._observer.progress(tokens(), self._finished, self._total)

    def groups(self) -> list[list[Completion]]:
        """Return the groups, after all completions have ended."""
        return self._groups
