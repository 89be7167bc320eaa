"""How well scores order the responses of a group: Kendall's τ-b, pairwise and top-1 accuracy, consistency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev

from grpo_fast.run_record.summary import Interval, mean_interval


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's τ-b (1945, Biometrika 33, p. 239): ties in either sequence leave its denominator.

    NaN when one of them is all ties: there is no order to agree with.

    Raises:
        ValueError: the sequences differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b {len(b)}; give one of each for every item")
    agreement = free_a = free_b = 0
    for i, j in combinations(range(len(a)), 2):
        of_a, of_b = _sign(a[i] - a[j]), _sign(b[i] - b[j])
        agreement += of_a * of_b
        free_a += abs(of_a)
        free_b += abs(of_b)
    if not free_a or not free_b:
        return math.nan
    return agreement / math.sqrt(free_a * free_b)


def pairwise_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Share of the pairs of different grade that the scores order the same way; equal scores count a half.

    NaN when the grades are all ties.
    """
    right = [
        0.5 + 0.5 * _sign(grades[i] - grades[j]) * _sign(scores[i] - scores[j])
        for i, j in combinations(range(len(grades)), 2)
        if grades[i] != grades[j]
    ]
    return fmean(right) if right else math.nan


def top1_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Whether the highest score has the highest grade; among equal highest scores, the share that has.

    NaN when the grades are all ties.
    """
    best, highest = max(grades), max(scores)
    if best == min(grades):
        return math.nan
    return fmean(grade == best for grade, score in zip(grades, scores, strict=True) if score == highest)


@dataclass(frozen=True)
class GroupRanking:
    """One group: what its responses deserve, and what a policy gives them."""

    grades: tuple[float, ...]  # higher is better
    logprobs: tuple[float, ...]  # summed over the response
    lengths: tuple[int, ...]  # tokens
    group_type: str | None = None

    def scores(self, averaged: bool) -> tuple[float, ...]:
        """Log-probabilities, summed or per token."""
        if not averaged:
            return self.logprobs
        return tuple(logprob / n for logprob, n in zip(self.logprobs, self.lengths, strict=True))


@dataclass(frozen=True)
class RankingEvaluation:
    """Agreement of log-probabilities with the grades of G groups. Groups that are all ties don't count."""

    groups: tuple[GroupRanking, ...]
    averaged: bool  # whether `score` compares log-probabilities per token

    @property
    def n(self) -> int:
        """Groups that count."""
        return len(self._accuracies(self.groups, self.averaged))

    @property
    def score(self) -> float:
        """Pairwise accuracy, mean over groups."""
        return fmean(self._accuracies(self.groups, self.averaged))

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score`: groups are the independent units, not pairs."""
        low, high = mean_interval(self._accuracies(self.groups, self.averaged))
        return max(0.0, low), min(1.0, high)

    @property
    def metrics(self) -> dict[str, float]:
        """Every measure for summed (`sum`) and length-normalised (`mean`) log-probability, and by group type.

        `consistency/TYPE` is one less the standard deviation of the pairwise accuracy over the groups of a
        type: 1 when the policy ranks all of them equally well.
        """
        found: dict[str, float] = {}
        for averaged, name in ((False, "sum"), (True, "mean")):
            found[f"ranking/{name}/pairwise_accuracy"] = fmean(self._accuracies(self.groups, averaged))
            found[f"ranking/{name}/top1_accuracy"] = fmean(
                _defined(top1_accuracy(group.grades, group.scores(averaged)) for group in self.groups)
            )
            # A policy that gives all responses of a group one score agrees with no order.
            found[f"ranking/{name}/kendall_tau"] = fmean(
                0.0 if math.isnan(tau) else tau
                for group in self.groups
                if len(set(group.grades)) > 1
                for tau in [kendall_tau_b(group.grades, group.scores(averaged))]
            )
        return found | self._by_type()

    def _by_type(self) -> dict[str, float]:
        found = {}
        for kind in sorted({group.group_type for group in self.groups if group.group_type is not None}):
            members = [group for group in self.groups if group.group_type == kind]
            accuracies = self._accuracies(members, self.averaged)
            if accuracies:
                found[f"ranking/pairwise_accuracy/{kind}"] = fmean(accuracies)
                found[f"ranking/consistency/{kind}"] = 1.0 - pstdev(accuracies)
        return found

    @staticmethod
    def _accuracies(groups: Iterable[GroupRanking], averaged: bool) -> list[float]:
        return _defined(pairwise_accuracy(group.grades, group.scores(averaged)) for group in groups)


def _defined(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
