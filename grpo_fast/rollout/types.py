"""The one protocol between the trainer and whatever generates, and what they exchange."""

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

PromptTokens = Sequence[Sequence[int]]  # tokenised

REPORT_SECONDS = 0.1  # at least, between two reports of progress


@dataclass(frozen=True, config=EXACT)
class Sampling:
    """How completions are drawn.

    Raises:
        ValueError: for values outside their ranges.
    """

    max_completion_length: PositiveInt
    temperature: NotNegative = 1.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0  # 0: no limit
    min_p: Fraction = 0.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: int | None = None
    logprobs: bool = True  # reported with completions; an engine to which they cost nothing always does


@dataclasses.dataclass(frozen=True)
class Episode:
    """What a completion of several turns has besides its tokens."""

    prompt: str | list[Message]  # with what the environment began it with
    prompt_ids: tuple[int, ...]
    sampled: tuple[bool, ...]  # of each token after the prompt: drawn by the model, not the environment's
    messages: tuple[Message, ...]  # after the prompt
    environment: Any = None  # the instance, until the rewards are known
    tool_calls: int = 0
    tool_failures: int = 0  # calls that raised, were of no known tool, or were given up
    tools_given_up: int = 0  # calls that did not return in time
    environment_seconds: float = 0.0  # that its calls took
    reward: float | None = None  # what `get_reward` of the environment gave

    @property
    def turns(self) -> int:
        """Messages of the model."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    token_ids: tuple[int, ...]  # the end token included when one was drawn
    logprobs: tuple[float, ...] | None  # of each token, under what it was drawn from; None: unasked
    text: str  # as `completion_texts` decodes it: without end tokens and those of the chat template
    truncated: bool  # stopped by a limit of tokens, turns or calls
    episode: Episode | None = None  # of several turns: an environment's tokens have logprob 0
    # Of a rollout's own, by name a number for each token: a loss of one's own finds them in its inputs.
    columns: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    # (t, L, k) integers: of the first t tokens of prompt and completion the experts that each of L layers
    # chose, where rollout.router_replay asks for them; the last token's are never known.
    experts: np.ndarray[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model wrote."""
        return len(self.token_ids) if self.episode is None else sum(self.episode.sampled)

    def without_environment(self) -> Completion:
        """The completion as it is kept, and sent to other ranks, once the rewards are known."""
        episode = self.episode and dataclasses.replace(self.episode, environment=None)
        return dataclasses.replace(self, episode=episode, experts=None)


def as_asked(prompt: Prompt, completion: Completion) -> Prompt:
    """A prompt as this completion answers it: with what its environment began the episode with."""
    if (episode := completion.episode) is None:
        return prompt
    return dataclasses.replace(prompt, prompt=episode.prompt, token_ids=episode.prompt_ids)


class RolloutObserver(Protocol):
    """Hears of a rollout while it runs, in the thread that called `generate`."""

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
        self, prompts: PromptTokens, n: int, sampling: Sampling, *, observer: RolloutObserver | None = None
    ) -> list[list[Completion]]:
        """`n` completions for each tokenised prompt, in the order of the prompts.

        One that takes images has an argument `images`, of each prompt its own or None, which is given where
        a prompt has some.

        The same `sampling.seed` gives the same tokens; the global random state is neither read nor changed.

        Raises:
            RuntimeError: the engine sleeps.
            ValueError: an empty prompt, `n` below 1, or a completion for which there is no room.
            FloatingPointError: the weights hold NaN, or the logits where log-probabilities are reported.
        """
        ...

    def serve(self, requests: Requests) -> None:
        """Draw what clients ask for, until none will ask again; `generate` is not called meanwhile.

        A request that cannot be answered gets the ValueError that `generate` would raise; the others go on.
        Raises otherwise as `generate`.
        """
        ...

    def sleep(self) -> None:
        """Free the memory; does nothing when asleep."""
        ...

    def sync(self, policy: Policy) -> None:
        """Take over the policy's current weights, asleep or awake; nothing cached from older ones is kept.

        Raises:
            FloatingPointError: the weights hold NaN, where `generate` would not notice.
            ValueError: another policy than the engine was made with.
        """
        ...

    def wake(self) -> None:
        """Be ready to generate; does nothing when awake.

        Raises:
            RuntimeError: the weights were dropped and not synced since, or there is no memory to wake in.
        """
        ...

    def freed(self) -> int:
        """Bytes that `sleep` has given back, and that `sync` and `wake` will take again."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...


class Rollout(Protocol):
    """How prompts become completions: in one turn by `generate_rollout`, or in several."""

    def __call__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        observer: RolloutObserver | None = None,
    ) -> list[list[Completion]]:
        """`n` completions for each prompt, in the order of the prompts."""
        ...


def generate_rollout(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    *,
    observer: RolloutObserver | None = None,
) -> list[list[Completion]]:
    """The `Rollout` of one turn."""
    given: dict[str, Any] = {}
    if any(prompt.images for prompt in prompts):
        given["images"] = [prompt.images for prompt in prompts]
    return engine.generate([prompt.token_ids for prompt in prompts], n, sampling, observer=observer, **given)


def check_prompts(prompts: PromptTokens, n: int) -> None:
    """Raises ValueError for a prompt without tokens, or `n` below 1."""
    if n < 1:
        raise ValueError(f"n = {n} must be at least 1")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{index}] has no tokens; a prompt needs at least one")


class Collector:
    """Completions as they end, in whatever order, into groups in the order of the prompts."""

    def __init__(self, prompts: int, n: int, observer: RolloutObserver | None = None) -> None:
        self._finished = self._tokens = 0  # of the completions that have ended
        self._total = prompts * n
        self._groups: list[list[Any]] = [[None] * n for _ in range(prompts)]
        self._observer = observer
        self._reported = time.monotonic()

    def add(self, prompt: int, number: int, completion: Completion) -> None:
        """Completion `number` of `prompt` has ended."""
        group = self._groups[prompt]
        group[number] = completion
        self._finished += 1
        self._tokens += len(completion.token_ids)
        if self._observer is not None and None not in group:
            self._observer.group_done(prompt, group)

    def report(self, decoding: Callable[[], int]) -> None:
        """`decoding` counts tokens of completions that still go on; passed on at times, and at the end."""
        self.progress(lambda: self._tokens + decoding())

    def progress(self, tokens: Callable[[], int]) -> None:
        """`tokens` counts all that are decoded, and is asked only where that is passed on."""
        due = self._finished == self._total or time.monotonic() - self._reported >= REPORT_SECONDS
        if self._observer is not None and due:
            self._reported = time.monotonic()
            self._observer.progress(tokens(), self._finished, self._total)

    def groups(self) -> list[list[Completion]]:
        """The groups, once everything has ended."""
        return self._groups
