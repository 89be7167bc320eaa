"""A rollout and what goes on beside it: rewards of complete groups, the display, the trainer's return."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_fast.data.types import Prompt
from grpo_fast.rewards import RewardSet
from grpo_fast.rewards.early import EarlyScores
from grpo_fast.rollout.types import Completion, Engine, Sampling

LAST_DECODE = 0.9  # share of completions that have ended when the trainer may start to come back

Progress = Callable[[int, int, int], None]  # tokens decoded, completions ended, completions in all


class RolloutWatch:
    """The observer of one rollout."""

    def __init__(
        self,
        *,
        scores: EarlyScores | None = None,
        progress: Progress | None = None,
        last_decode: Callable[[], None] | None = None,
    ) -> None:
        self._scores = scores
        self._progress = progress
        self._last_decode = last_decode

    def group_done(self, index: int, completions: list[Completion]) -> None:
        if self._scores is not None:
            self._scores.group_done(index, completions)

    def progress(self, tokens: int, finished: int, total: int) -> None:
        if self._progress is not None:
            self._progress(tokens, finished, total)
        if self._last_decode is not None and finished >= LAST_DECODE * total:
            self._last_decode()
            self._last_decode = None


def generate_and_score(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    rewards: RewardSet,
    *,
    progress: Progress | None = None,
    last_decode: Callable[[], None] | None = None,
) -> tuple[list[list[Completion]], EarlyScores | None]:
    """`n` completions of each prompt, and the rewards that were begun meanwhile; None where none may be."""
    early = any(reward.per_group for reward in rewards.rewards)
    scores = EarlyScores(rewards, prompts) if early else None
    watch = RolloutWatch(scores=scores, progress=progress, last_decode=last_decode)
    watch.progress(0, 0, n * len(prompts))  # the prefill counts
    try:
        ids = [prompt.token_ids for prompt in prompts]
        return engine.generate(ids, n, sampling, observer=watch), scores
    except BaseException:
        if scores is not None:
            scores.cancel()
        raise
