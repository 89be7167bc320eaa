"""How well scores order the responses of a group: Kendall's τ-b, pairwise and top-1 accuracy, consistency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev

import torch
from torch import Tensor

from grpo_fast.data.table import CompletionTable
from grpo_fast.preference.comparison import group_sizes
from grpo_fast.record.summary import Interval, mean_interval


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's τ-b (1945, Biometrika 33, p. 239): ties in either sequence leave its denominator.

    Zero when one of them is all ties: it agrees with no order.
    """
    of_a, of_b = _orders(a), _orders(b)
    free = sum(map(abs, of_a)) * sum(map(abs, of_b))
    return sum(x * y for x, y in zip(of_a, of_b, strict=True)) / math.sqrt(free) if free else 0.0


def pairwise_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Share of the pairs of different grade that the scores order the same way; equal scores count a half."""
    pairs = zip(_orders(grades), _orders(scores), strict=True)
    return fmean(0.5 + 0.5 * wanted * found for wanted, found in pairs if wanted)


def top1_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Whether the highest score has the highest grade; among equal highest scores, the share that has."""
    best, highest = max(grades), max(scores)
    return fmean(grade == best for grade, score in zip(grades, scores, strict=True) if score == highest)


def position_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Share of the positions of the order that hold a response of the right grade.

    Of responses with equal scores each is as likely in any of their positions.
    """
    orders = zip(sorted(grades, reverse=True), sorted(scores, reverse=True), strict=True)
    return fmean(
        fmean(grade == wanted for grade, score in zip(grades, scores, strict=True) if score == place)
        for wanted, place in orders
    )


@dataclass(frozen=True)
class RankingEvaluation:
    """Agreement of log-probabilities with the grades of G groups, in none of which all grades tie."""

    table: CompletionTable
    logprobs: Tensor  # (S,) of each completion, summed over its tokens
    averaged: bool  # whether `score` compares log-probabilities per token

    @property
    def n(self) -> int:
        return self.table.num_groups

    @property
    def score(self) -> float:
        """Pairwise accuracy, mean over groups."""
        return fmean(self._measure(pairwise_accuracy, self.averaged))

    @property
    def criterion(self) -> str:
        return "pairwise_accuracy"

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of `score`: groups are the independent units, not pairs."""
        low, high = mean_interval(self._measure(pairwise_accuracy, self.averaged))
        return max(0.0, low), min(1.0, high)

    @property
    def metrics(self) -> dict[str, float]:
        """Every measure for summed (`sum`) and length-normalised (`mean`) log-probability, and by group type.

        `consistency/TYPE` is one less the standard deviation of the pairwise accuracy over the groups of a
        type: 1 when the policy ranks all of them equally well; a type of one group has none. `consistency` is
        the same over the types' means, where there are several.
        """
        found = {}
        for kind, averaged in (("sum", False), ("mean", True)):
            for name, measure in MEASURES.items():
                found[f"ranking/{kind}/{name}"] = fmean(self._measure(measure, averaged))
        first = torch.tensor([0, *group_sizes(self.table)]).cumsum(0)[:-1].tolist()
        kinds = [self.table.objects["group_type"][row] for row in first]
        means = []
        for name in ("position_accuracy", "pairwise_accuracy"):
            measured = self._measure(MEASURES[name], self.averaged)
            for kind in sorted({kind for kind in kinds if kind is not None}):
                values = [value for value, of in zip(measured, kinds, strict=True) if of == kind]
                found[f"ranking/{name}/{kind}"] = fmean(values)
                if name == "pairwise_accuracy":
                    means.append(fmean(values))
                    if len(values) > 1:
                        found[f"ranking/consistency/{kind}"] = 1.0 - pstdev(values)
        if len(means) > 1:
            found["ranking/consistency"] = 1.0 - pstdev(means)
        return found

    def _measure(self, measure: Measure, averaged: bool) -> list[float]:
        """Of the grades and the scores of each group."""
        scores = self.logprobs / self.table.lengths if averaged else self.logprobs
        sizes = group_sizes(self.table)
        rows = zip(self.table.facts["grade"].split(sizes), scores.split(sizes), strict=True)
        return [measure(grades.tolist(), own.tolist()) for grades, own in rows]


Measure = Callable[[Sequence[float], Sequence[float]], float]
MEASURES: dict[str, Measure] = {
    "pairwise_accuracy": pairwise_accuracy,
    "position_accuracy": position_accuracy,
    "top1_accuracy": top1_accuracy,
    "kendall_tau": kendall_tau_b,
}


def _orders(values: Sequence[float]) -> list[int]:
    """Of every two values 1 where the first is larger, -1 where it is smaller, 0 where they are equal."""
    return [(a > b) - (a < b) for a, b in combinations(values, 2)]
