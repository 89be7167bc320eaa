"""Scores a policy on questions: the share of right answers, pass@k, mean@k, each with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isnan
from statistics import fmean
from typing import Annotated

from pydantic import Field

from grpo_fast.data.config import DatasetConfig
from grpo_fast.data.types import Prompt
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout.types import Completion, Engine, RolloutObserver, Sampling
from grpo_fast.run_record.summary import Interval, mean_interval
from grpo_fast.section import PositiveInt, Section


class EvaluationConfig(Section):
    """When and how held-out questions are scored."""

    dataset: DatasetConfig | None = None
    every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between evaluations; 0: before and after only"
    )
    size: PositiveInt | None = Field(
        None, description="questions used while training; before and after use all"
    )
    num_samples: PositiveInt = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    threshold: float = Field(1.0, description="the reward from which an answer counts as right")
    reward: str | None = Field(None, description="which reward decides; none: the first")


@dataclass(frozen=True)
class Evaluation:
    """What the answers to Q questions earned, n answers each."""

    scores: tuple[tuple[float, ...], ...]  # (Q, n) of the deciding reward; NaN where it does not apply
    reward_name: str  # the deciding reward
    threshold: float  # the score from which an answer is right
    prompts: tuple[Prompt, ...]  # (Q,)
    completions: tuple[tuple[Completion, ...], ...]  # (Q, n)

    @property
    def n(self) -> int:
        """Questions that count: those with at least one answer that the reward applies to."""
        return len(self._counts)

    @property
    def skipped(self) -> int:
        """Questions that do not count, because the deciding reward applies to none of their answers."""
        return len(self.scores) - self.n

    @property
    def num_samples(self) -> int:
        """Answers to each question."""
        return len(self.scores[0])

    @property
    def score(self) -> float:
        """Share of right answers: mean@n, the expected pass@1; with one greedy answer, accuracy."""
        return self.pass_at(1)

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score` over questions."""
        return self.interval_at(1)

    @property
    def mean_reward(self) -> float:
        """Mean of the deciding reward over all answers it applies to."""
        return fmean(score for row in self.scores for score in row if not isnan(score))

    @property
    def truncated(self) -> float:
        """Share of answers cut off by the length limit."""
        answers = [completion for group in self.completions for completion in group]
        return sum(completion.truncated for completion in answers) / len(answers)

    @property
    def metrics(self) -> dict[str, float]:
        """What a run records beside `score`."""
        return {"reward": self.mean_reward, "truncated": self.truncated}

    def pass_at(self, k: int) -> float:
        """Expected share of questions with at least one right answer among `k`.

        Raises:
            ValueError: `k` exceeds the answers that a question has.
        """
        return fmean(self._pass_rates(k))

    def interval_at(self, k: int) -> Interval:
        """95 % confidence interval of `pass_at(k)`: questions are the independent units, not answers."""
        low, high = mean_interval(self._pass_rates(k))
        return max(0.0, low), min(1.0, high)

    @property
    def _counts(self) -> list[tuple[int, int]]:
        """(answers, right answers) of each question that counts."""
        applicable = [[score for score in row if not isnan(score)] for row in self.scores]
        return [(len(row), sum(map(self._is_right, row))) for row in applicable if row]

    def _is_right(self, score: float) -> bool:
        # Scores went through fp32 and the threshold did not.
        return score >= self.threshold or isclose(score, self.threshold, rel_tol=1e-6)

    def _pass_rates(self, k: int) -> list[float]:
        return [pass_at_k(total, right, k) for total, right in self._counts]


def pass_at_k(total: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers is right, from `right` of `total` drawn ones.

    1 - C(total - right, k) / C(total, k), as a product (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Raises:
        ValueError: `k` is not in 1..total.
    """
    if not 1 <= k <= total:
        raise ValueError(f"k = {k} needs at least as many answers to a question, and there are {total}")
    if total - right < k:
        return 1.0
    missed = 1.0
    for i in range(total - right + 1, total + 1):
        missed *= 1 - k / i
    return 1 - missed


def evaluate(
    engine: Engine,
    dataset: Sequence[Prompt],
    rewards: RewardSet,
    *,
    sampling: Sampling,
    num_samples: int = 1,
    threshold: float = 1.0,
    reward_name: str | None = None,
    observer: RolloutObserver | None = None,
) -> Evaluation:
    """Answer every question `num_samples` times and score the answers.

    Args:
        engine: generates with the weights it holds.
        dataset: the questions.
        rewards: all are computed; one decides.
        sampling: how answers are drawn; several answers need a temperature.
        threshold: the reward from which an answer is right.
        reward_name: which reward decides; none: the first.
        observer: told how the generation goes.

    Raises:
        ValueError: no questions, a reward that is not there, several greedy answers, or a deciding reward
            that applies to no answer.
    """
    if not dataset:
        raise ValueError("the dataset is empty: there is nothing to evaluate")
    if num_samples > 1 and sampling.temperature == 0:
        raise ValueError(
            f"num_samples = {num_samples} at temperature 0 gives the same answer each time; "
            "set evaluation.temperature above 0 or num_samples to 1"
        )
    column = reward_column(rewards.names, reward_name)
    ids = [prompt.token_ids for prompt in dataset]
    completions = engine.generate(ids, num_samples, sampling, observer=observer)
    table = rewards.score_completions(dataset, completions).table
    scores = table[:, column].view(len(dataset), num_samples)
    if scores.isnan().all():
        raise ValueError(
            f"the reward {rewards.names[column]} applies to no answer; name another one in evaluation.reward "
            f"({', '.join(rewards.names)})"
        )
    return Evaluation(
        scores=tuple(tuple(row) for row in scores.tolist()),
        reward_name=rewards.names[column],
        threshold=threshold,
        prompts=tuple(dataset),
        completions=tuple(tuple(group) for group in completions),
    )


def reward_column(names: Sequence[str], name: str | None) -> int:
    """Position of the deciding reward; none: the first.

    Raises:
        ValueError: no reward has this name.
    """
    if name is None:
        return 0
    if name not in names:
        raise ValueError(f"evaluation.reward = {name!r} is not among the rewards: {', '.join(names)}")
    return list(names).index(name)
