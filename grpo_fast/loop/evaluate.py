"""Scores a policy on questions: the share of right answers, pass@k, mean@k, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import comb, isclose, isnan, nan
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from grpo_fast.record.summary import Interval, mean_interval
from grpo_fast.rollout.types import generate_rollout

if TYPE_CHECKING:
    from grpo_fast.config.evaluation import EvaluationConfig
    from grpo_fast.data.types import Prompt
    from grpo_fast.distributed.world import World
    from grpo_fast.rewards import RewardSet
    from grpo_fast.rollout.types import Completion, Engine, Rollout, RolloutObserver, Sampling


@dataclass(frozen=True)
class Evaluation:
    """What the answers to Q questions earned, n answers each."""

    scores: tuple[tuple[float, ...], ...]  # (Q, n) of the deciding reward; NaN where it does not apply
    reward_name: str  # the deciding reward
    threshold: float  # the score from which an answer is right
    prompts: tuple[Prompt, ...]  # (Q,)
    completions: tuple[tuple[Completion, ...], ...]  # (Q, n)
    logged: Mapping[str, float] = field(default_factory=dict)  # means of what rewards logged
    mean_reward: float = nan  # of the weighted sum, over all answers that have one
    rewards: Mapping[str, float] = field(
        default_factory=dict
    )  # means of each reward; NaN: it applies to none

    @property
    def n(self) -> int:
        """Questions that count: those with at least one answer that the reward applies to."""
        return len(self._applicable)

    @property
    def skipped(self) -> int:
        """Questions that do not count, because the deciding reward applies to none of their answers."""
        return len(self.scores) - self.n

    @property
    def num_samples(self) -> int:
        """Answers to each question."""
        return len(self.scores[0])

    @property
    def criterion(self) -> str:
        """When an answer is right."""
        return criterion(self.reward_name, self.threshold)

    @property
    def score(self) -> float:
        """Share of right answers: mean@n, the expected pass@1; with one greedy answer, accuracy."""
        return self.pass_at(1)

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score` over questions."""
        return self.interval_at(1)

    @property
    def truncated(self) -> float:
        """Share of answers cut off by a limit."""
        return fmean(completion.truncated for group in self.completions for completion in group)

    @property
    def metrics(self) -> dict[str, float]:
        """What a run records beside `score`."""
        logged = {f"logged/{name}": value for name, value in self.logged.items()}
        means = {f"reward/{name}/mean": value for name, value in self.rewards.items()}
        return {"reward": self.mean_reward, **means, "truncated": self.truncated, **logged}

    def counted_at(self, k: int) -> int:
        """Questions with at least `k` answers that the deciding reward applies to: those of `pass_at(k)`."""
        return sum(len(row) >= k for row in self._applicable)

    def pass_at(self, k: int) -> float:
        """Expected share of questions with at least one right answer among `k`.

        Raises:
            ValueError: no question has `k` answers that the deciding reward applies to.
        """
        return fmean(self._pass_rates(k))

    def interval_at(self, k: int) -> Interval:
        """95 % confidence interval of `pass_at(k)`: questions are the independent units, not answers."""
        low, high = mean_interval(self._pass_rates(k))
        return max(0.0, low), min(1.0, high)

    @property
    def _applicable(self) -> list[list[float]]:
        rows = ([score for score in row if not isnan(score)] for row in self.scores)
        return [row for row in rows if row]

    def _is_right(self, score: float) -> bool:
        # Scores went through fp32 and the threshold did not.
        return score >= self.threshold or isclose(score, self.threshold, rel_tol=1e-6)

    def _pass_rates(self, k: int) -> list[float]:
        rows = self._applicable
        counted = [row for row in rows if len(row) >= k] or rows[:1]  # the first says what is missing
        return [pass_at_k(len(row), sum(map(self._is_right, row)), k) for row in counted]


def criterion(reward: str, threshold: float) -> str:
    """Say when an answer is right: `exact_match>=1`."""
    return f"{reward}>={threshold:g}"


def pass_at_k(total: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers is right, from `right` of `total` drawn ones.

    Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: `k` is not in 1..total.
    """
    if not 1 <= k <= total:
        raise ValueError(f"k = {k} needs at least as many answers to a question, and there are {total}")
    return 1 - comb(total - right, k) / comb(total, k)


def evaluate(
    engine: Engine,
    questions: Sequence[Prompt],
    rewards: RewardSet,
    config: EvaluationConfig,
    sampling: Sampling,
    *,
    world: World,
    rollout: Rollout = generate_rollout,
    observer: RolloutObserver | None = None,
) -> Evaluation:
    """Answer every question `config.num_samples` times and score the answers.

    Args:
        engine: generates with the weights it holds.
        rewards: all are computed; one decides.
        sampling: how answers are drawn; several answers need a temperature.
        world: the ranks that answer, each its share.
        rollout: how answers are drawn, in one turn or in several.
        observer: told how the generation goes.

    Raises:
        ValueError: no questions, a reward that is not there, several greedy answers, or a deciding reward
            that applies to no answer.
    """
    n = config.num_samples
    if not questions:
        raise ValueError("the dataset is empty: there is nothing to evaluate")
    if n > 1 and sampling.temperature == 0:
        raise ValueError(
            f"num_samples = {n} at temperature 0 gives the same answer each time; set evaluation.temperature "
            "above 0 or num_samples to 1"
        )
    deciding = rewards.position(config.reward)
    name = rewards.names[deciding]
    with world.all_succeed("the evaluation") as parts:
        own = world.share(questions)
        completions = rollout(engine, own, n, sampling, observer=observer)
        if own:
            result = rewards.score_completions(own, completions)
            table = result.table
            kept = [[completion.without_environment() for completion in group] for group in completions]
            values = torch.cat([result.total[:, None], table], dim=1)
            parts.append((kept, values.tolist(), result.log.metrics))
    completions = [group for found, _, _ in parts for group in found]
    values = torch.tensor([row for _, found, _ in parts for row in found], dtype=torch.float64)
    scores = values[:, 1 + deciding].view(-1, n).tolist()
    total, *means = values.nanmean(0).tolist()
    names = dict.fromkeys(name for _, _, logged in parts for name in logged)
    logged = {name: fmean(v for _, _, found in parts for v in found.get(name, ())) for name in names}
    if all(map(isnan, chain.from_iterable(scores))):
        raise ValueError(
            f"the reward {name} applies to no answer; name another one in evaluation.reward "
            f"({', '.join(rewards.names)})"
        )
    return Evaluation(
        scores=tuple(map(tuple, scores)),
        reward_name=name,
        threshold=config.threshold,
        prompts=tuple(questions),
        completions=tuple(map(tuple, completions)),
        logged=logged,
        mean_reward=total,
        rewards=dict(zip(rewards.names, means, strict=True)),
    )
