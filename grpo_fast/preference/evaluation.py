"""How well scores order the responses of a group: Kendall's τ-b, pairwise and top-1 accuracy, consistency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
        return len(self._measure(pairwise_accuracy))

    @property
    def score(self) -> float:
        """Pairwise accuracy, mean over groups."""
        return fmean(self._measure(pairwise_accuracy))

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score`: groups are the independent units, not pairs."""
        low, high = mean_interval(self._measure(pairwise_accuracy))
        return max(0.0, low), min(1.0, high)

    @property
    def metrics(self) -> dict[str, float]:
        """Every measure for summed (`sum`) and length-normalised (`mean`) log-probability, and by group type.

        `consistency/TYPE` is one less the standard deviation of the pairwise accuracy over the groups of a
        type: 1 when the policy ranks all of them equally well.
        """
        measures = {
            "pairwise_accuracy": pairwise_accuracy,
            "top1_accuracy": top1_accuracy,
            "kendall_tau": _agreement,
        }
        found = {
            f"ranking/{kind}/{name}": fmean(replace(self, averaged=averaged)._measure(measure))
            for averaged, kind in ((False, "sum"), (True, "mean"))
            for name, measure in measures.items()
        }
        for kind in sorted({group.group_type for group in self.groups if group.group_type is not None}):
            members = tuple(group for group in self.groups if group.group_type == kind)
            if accuracies := replace(self, groups=members)._measure(pairwise_accuracy):
                found[f"ranking/pairwise_accuracy/{kind}"] = fmean(accuracies)
                found[f"ranking/consistency/{kind}"] = 1.0 - pstdev(accuracies)
        return found

    def _measure(self, measure: Callable[[Sequence[float], Sequence[float]], float]) -> list[float]:
        """Of the grades and the scores of each group that counts."""
        groups = (group for group in self.groups if len(set(group.grades)) > 1)
        return [measure(group.grades, group.scores(self.averaged)) for group in groups]


def _agreement(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Kendall's τ-b; a policy that gives all responses of a group one score agrees with no order."""
    tau = kendall_tau_b(grades, scores)
    return 0.0 if math.isnan(tau) else tau


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
