"""Score a policy on questions: the share of right answers, pass@k and their intervals."""

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
    """Rewards of n sampled completions for each of Q questions."""

    scores: tuple[tuple[float, ...], ...]  # (Q, n) of the deciding reward; NaN where it does not apply
    reward_name: str  # the deciding reward
    threshold: float  # lowest score of a right answer
    prompts: tuple[Prompt, ...]  # (Q,)
    completions: tuple[tuple[Completion, ...], ...]  # (Q, n)
    logged: Mapping[str, float] = field(default_factory=dict)  # means of the metrics that rewards logged
    mean_reward: float = nan  # of the weighted sum, over all answers that have one
    rewards: Mapping[str, float] = field(default_factory=dict)  # mean of each reward; NaN: it never applies

    @property
    def n(self) -> int:
        """Number of questions with an answer that the deciding reward applies to; others do not count."""
        return len(self._applicable)

    @property
    def skipped(self) -> int:
        return len(self.scores) - self.n

    @property
    def num_samples(self) -> int:
        return len(self.scores[0])

    @property
    def criterion(self) -> str:
        return criterion(self.reward_name, self.threshold)

    @property
    def score(self) -> float:
        """Share of right answers: mean@n, the expected pass@1; accuracy with one greedy answer."""
        return self.pass_at(1)

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score` over questions."""
        return self.interval_at(1)

    @property
    def truncated(self) -> float:
        """Share of answers cut off by a length limit."""
        return fmean(completion.truncated for group in self.completions for completion in group)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a run next to `score`."""
        logged = {f"logged/{name}": value for name, value in self.logged.items()}
        means = {f"reward/{name}/mean": value for name, value in self.rewards.items()}
        return {"reward": self.mean_reward, **means, "truncated": self.truncated, **logged}

    def counted_at(self, k: int) -> int:
        """Return the number of questions of `pass_at(k)`: those with `k` answers that have a score."""
        return sum(len(row) >= k for row in self._applicable)

    def pass_at(self, k: int) -> float:
        """Return the expected share of questions with a right answer among `k`."""
        return fmean(self._pass_rates(k))

    def interval_at(self, k: int) -> Interval:
        """Return the 95 % confidence interval of `pass_at(k)`, whose independent units are questions."""
        low, high = mean_interval(self._pass_rates(k))
        return max(0.0, low), min(1.0, high)

    @property
    def _applicable(self) -> list[list[float]]:
        rows = ([score for score in row if not isnan(score)] for row in self.scores)
        return [row for row in rows if row]

    def _pass_rates(self, k: int) -> list[float]:
        def is_right(score: float) -> bool:  # scores were rounded to float32, the threshold was not
            return score >= self.threshold or isclose(score, self.threshold, rel_tol=1e-6)

        rows = self._applicable
        counted = [row for row in rows if len(row) >= k] or rows[:1]  # whose error has the number of answers
        return [pass_at_k(len(row), sum(map(is_right, row)), k) for row in counted]


def criterion(reward: str, threshold: float) -> str:
    """Return when an answer is right: `exact_match>=1`."""
    return f"{reward}>={threshold:g}"


def pass_at_k(total: int, right: int, k: int) -> float:
    """Estimate, without bias, the chance that one of `k` answers is right, from `right` of `total` samples.

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
    """Sample `config.num_samples` answers to each question, and score them; one reward decides.

    Raises:
        ValueError: no questions, an unknown reward, several greedy answers, or a deciding reward that applies
            to no answer.
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
        share = world.share(questions)
        answers = rollout(engine, share, n, sampling, observer=observer)
        if share:
            result = rewards.score_completions(share, answers)
            kept = [tuple(completion.without_environment() for completion in group) for group in answers]
            values = torch.cat([result.total[:, None], result.table], dim=1)
            parts.append((kept, values.tolist(), result.log.metrics))
    values = torch.tensor([row for _, rows, _ in parts for row in rows], dtype=torch.float64)
    scores = values[:, 1 + deciding].view(-1, n).tolist()
    total, *means = values.nanmean(0).tolist()
    names = dict.fromkeys(name for _, _, metrics in parts for name in metrics)
    logged = {name: fmean(v for _, _, metrics in parts for v in metrics.get(name, ())) for name in names}
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
        completions=tuple(group for groups, _, _ in parts for group in groups),
        logged=logged,
        mean_reward=total,
        rewards=dict(zip(rewards.names, means, strict=True)),
    )
