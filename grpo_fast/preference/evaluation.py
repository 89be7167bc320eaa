"""Measure how well scores order the responses of a group: Kendall's τ-b, accuracies, consistency."""

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
    """Compute Kendall's τ-b (1945, Biometrika 33, p. 239); zero where one sequence is all ties."""
    of_a, of_b = _orders(a), _orders(b)
    free = sum(map(abs, of_a)) * sum(map(abs, of_b))
    return sum(x * y for x, y in zip(of_a, of_b, strict=True)) / math.sqrt(free) if free else 0.0


def pairwise_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Compute the share of pairs of different grade that the scores order alike; ties count a half."""
    pairs = zip(_orders(grades), _orders(scores), strict=True)
    return fmean(0.5 + 0.5 * wanted * found for wanted, found in pairs if wanted)


def top1_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Return 1 if the highest score has the highest grade, or the share of tied highest scores that has."""
    best, highest = max(grades), max(scores)
    return fmean(grade == best for grade, score in zip(grades, scores, strict=True) if score == highest)


def position_accuracy(grades: Sequence[float], scores: Sequence[float]) -> float:
    """Compute the share of positions with a response of the right grade.

    Responses with equal scores are equally likely in any of their positions.
    """
    orders = zip(sorted(grades, reverse=True), sorted(scores, reverse=True), strict=True)
    return fmean(
        fmean(grade == wanted for grade, score in zip(grades, scores, strict=True) if score == place)
        for wanted, place in orders
    )


@dataclass(frozen=True)
class RankingEvaluation:
    """Agreement of log-probabilities with the grades of groups, in none of which all grades tie."""

    table: CompletionTable
    logprobs: Tensor  # (S,) of each completion, summed over its tokens
    averaged: bool  # `score` compares log-probabilities per token

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
        """95 % confidence interval of `score`, whose independent units are groups."""
        low, high = mean_interval(self._measure(pairwise_accuracy, self.averaged))
        return max(0.0, low), min(1.0, high)

    @property
    def metrics(self) -> dict[str, float]:
        """Every measure for summed (`sum`) and length-normalized (`mean`) log-probabilities, and by type.

        `consistency/TYPE` is 1 minus the standard deviation of the pairwise accuracy over a type's groups, if
        there are several. `consistency` is the same over the types' means.
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
        """Apply a measure to the grades and scores of each group."""
        scores = self.logprobs / self.table.lengths if averaged else self.logprobs
        sizes = group_sizes(self.table)
        rows = zip(self.table.facts["grade"].split(sizes), scores.split(sizes), strict=True)
        return [measure(grades.tolist(), group.tolist()) for grades, group in rows]


Measure = Callable[[Sequence[float], Sequence[float]], float]
MEASURES: dict[str, Measure] = {
    "pairwise_accuracy": pairwise_accuracy,
    "position_accuracy": position_accuracy,
    "top1_accuracy": top1_accuracy,
    "kendall_tau": kendall_tau_b,
}


def _orders(values: Sequence[float]) -> list[int]:
    """Return for each two values 1 where the first is larger, -1 where it is smaller, else 0."""
    return [(a > b) - (a < b) for a, b in combinations(values, 2)]
