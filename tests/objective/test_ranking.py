"""Plackett-Luce against the sum over all orders, every objective against its definition, group by group."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations
from statistics import fmean

import pytest
import torch

from grpo_fast.objective.ranking import RankedInputs, RankingLossConfig, plackett_luce, ranking_loss

CONFIGS = [
    RankingLossConfig("plackett_luce"),
    RankingLossConfig("plackett_luce", score="logprob", length_normalised=True),
    RankingLossConfig("group_relative"),
    RankingLossConfig("pairwise", temperature=2.0),
    RankingLossConfig("pairwise", length_normalised=True),
    RankingLossConfig("advantage", epsilon_low=0.1, epsilon_high=0.3),
    RankingLossConfig("advantage_likelihood"),
    RankingLossConfig("advantage_likelihood", temperature=0.5, length_normalised=True),
]
every_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: c.objective + "-mean" * c.length_normalised
)


def order_probability(scores, order):
    probability, rest = 1.0, list(order)
    while rest:
        top = max(scores[i] for i in rest)
        weights = [math.exp(scores[i] - top) for i in rest]
        probability *= weights[0] / sum(weights)
        rest = rest[1:]
    return probability


def brute_force(scores, grades):
    """−log of the summed probability of every order that the grades allow."""
    allowed = [
        order
        for order in permutations(range(len(scores)))
        if all(grades[a] >= grades[b] for a, b in pairwise(order))
    ]
    return -math.log(math.fsum(order_probability(scores, order) for order in allowed))


@pytest.fixture
def ranked(rng):
    """Ragged groups with ties, one of them all ties; of half of the responses the writer is not recorded."""
    sizes, levels = [2, 5, 3, 6, 4], 3
    grades = torch.cat([torch.randint(levels, (n,), generator=rng) for n in sizes]).double()
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    grades[ids == 2] = 0.1

    def random(n=20):
        return torch.rand(n, generator=rng, dtype=torch.float64)

    lengths = torch.randint(1, 30, (len(ids),), generator=rng).double()
    logprobs = -lengths * (0.1 + random())
    logprobs[1], grades[1] = logprobs[0], 5.0  # of different grade and as likely: not told apart
    reference = logprobs + 4 * random() - 2
    written = reference + 2 * lengths * (random() - 0.5)
    written[::2] = torch.nan
    tied = torch.tensor([grades[ids == group].unique().numel() == 1 for group in range(5)])
    advantages = torch.where(tied[ids], 0.0, 4 * random() - 2)
    return RankedInputs(
        logprobs.requires_grad_(), lengths, grades, advantages, ids, 5, reference, written, weights=random(5)
    )


def definition(i, c):
    """The loss, and the accuracy of the log-probabilities over the pairs of different grade."""
    losses, accuracies = [], []
    columns = (i.logprobs, i.lengths, i.grades, i.ref_logprobs, i.behaviour_logprobs)
    for group, weight in enumerate(i.weights.tolist()):
        rows = list(zip(*(column[i.group_ids == group].tolist() for column in columns), strict=True))
        grades = [grade for _, _, grade, _, _ in rows]
        per = [n if c.length_normalised or c.objective == "group_relative" else 1.0 for _, n, _, _, _ in rows]
        pairs = [(a, b) for a in range(len(rows)) for b in range(len(rows)) if grades[a] > grades[b]]
        accuracies.append(fmean(rows[a][0] > rows[b][0] for a, b in pairs) if pairs else 0.0)
        advantages = i.advantages[i.group_ids == group].tolist()
        loss = 0.0
        if c.objective in ("plackett_luce", "group_relative", "pairwise"):
            against = [ref if c.score == "logratio" else 0.0 for _, _, _, ref, _ in rows]
            scores = [(row[0] - r) / n / c.temperature for row, r, n in zip(rows, against, per, strict=True)]
            if c.objective != "pairwise":
                loss = brute_force(scores, grades)
            elif pairs:
                loss = fmean(math.log1p(math.exp(scores[b] - scores[a])) for a, b in pairs)
        elif c.objective == "advantage":
            for (logprob, n, _, ref, written), a in zip(rows, advantages, strict=True):
                ratio = math.exp((logprob - (ref if math.isnan(written) else written)) / n)
                clipped = min(max(ratio, 1 - c.epsilon_low), 1 + c.epsilon_high)
                loss -= min(ratio * a, clipped * a) / len(rows)
        elif pairs:
            factors = [math.exp(a / c.temperature) for a in advantages]
            loss = -sum(f * row[0] / n for f, row, n in zip(factors, rows, per, strict=True)) / sum(factors)
        losses.append(weight * loss)
    return fmean(losses), fmean(accuracies)


@every_config
def test_an_objective_is_its_definition(config, ranked):
    outputs = ranking_loss(ranked, config)
    loss, accuracy = definition(ranked, config)
    torch.testing.assert_close(outputs.loss.item(), loss, rtol=1e-9, atol=1e-9)
    metrics = {name: value.item() for name, value in outputs.metrics.items()}
    groups = [ranked.group_ids == group for group in range(5)]
    assert metrics == pytest.approx(
        {
            "ranking/pairwise_accuracy": accuracy,
            "ranking/flat_groups": fmean(ranked.grades[own].unique().numel() == 1 for own in groups),
            "logps/mean": fmean(ranked.logprobs[own].mean().item() for own in groups),
        }
    )


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_plackett_luce_is_the_sum_over_all_orders_that_ties_allow(spread, rng):
    for levels in (1, 2, 3, 7):
        for size in (2, 4, 6):
            scores = spread * torch.randn(size, generator=rng, dtype=torch.float64)
            grades = torch.randint(levels, (size,), generator=rng).double()
            found = plackett_luce(scores, grades, torch.zeros(size, dtype=torch.int64), 1)
            expected = brute_force(scores.tolist(), grades.tolist())
            torch.testing.assert_close(found.item(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gap", [-2000.0, 2000.0])
def test_plackett_luce_stays_finite_for_extreme_scores(gap):
    scores = torch.tensor([gap, 0.0, gap, 1.0], requires_grad=True)
    loss = plackett_luce(scores, torch.tensor([2.0, 2.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64), 1)
    loss.sum().backward()
    assert loss.isfinite().all() and scores.grad.isfinite().all()


@every_config
def test_gradients_agree_with_finite_differences_and_micro_batches_add_up(config, ranked):
    assert torch.autograd.gradcheck(
        lambda logprobs: ranking_loss(replace(ranked, logprobs=logprobs), config).loss, (ranked.logprobs,)
    )

    def part(first, last):
        own = (ranked.group_ids >= first) & (ranked.group_ids < last)
        names = (
            "logprobs",
            "lengths",
            "grades",
            "advantages",
            "group_ids",
            "ref_logprobs",
            "behaviour_logprobs",
        )
        rows = {name: getattr(ranked, name)[own] for name in names}
        rows["group_ids"] = rows["group_ids"] - first
        groups = {"num_groups": last - first, "weights": ranked.weights[first:last], "total_groups": 5}
        return RankedInputs(**rows, **groups)

    whole = ranking_loss(ranked, config)
    parts = [ranking_loss(part(*bounds), config) for bounds in ((0, 2), (2, 3), (3, 5))]

    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(sum(p.metrics[name] for p in parts), value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"objective": "listnet"}, "objective = 'listnet'"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"objective": "advantage", "temperature": 2.0}, "temperature = 2.0 is not read"),
        ({"epsilon_low": 0.1}, "epsilon_low = 0.1 is not read"),
        ({"objective": "advantage", "epsilon_low": -0.1}, "epsilon_low = -0.1"),
    ],
)
def test_contradictory_constants_are_refused_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        RankingLossConfig(**arguments)


def test_scales_follow_the_objective_and_a_missing_reference_is_refused(ranked):
    scales = [(config.temperature, config.averaged, config.needs_reference) for config in CONFIGS]
    assert scales == [
        *((10.0, False, True), (1.0, True, False), (0.1, True, True), (2.0, False, True), (1.0, True, True)),
        *((None, True, True), (1.0, False, False), (0.5, True, False)),
    ]
    with pytest.raises(ValueError, match="ref_logprobs is None"):
        ranking_loss(replace(ranked, ref_logprobs=None), RankingLossConfig())
