"""Plackett-Luce against the sum over all orders, the other objectives against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch

from grpo_fast.objective.ranking import (
    RankedInputs,
    RankingLossConfig,
    grade_advantages,
    pairwise_logistic,
    plackett_luce,
    ranking_loss,
)

OBJECTIVES = ("plackett_luce", "pairwise", "advantage", "advantage_likelihood")


def order_probability(scores: list[float], order: tuple[int, ...]) -> float:
    probability, rest = 1.0, list(order)
    while rest:
        top = max(scores[i] for i in rest)
        weights = [math.exp(scores[i] - top) for i in rest]
        probability *= weights[0] / sum(weights)
        rest = rest[1:]
    return probability


def brute_force(scores: list[float], grades: list[float]) -> float:
    """−log of the summed probability of every order that the grades allow."""
    allowed = [
        order
        for order in permutations(range(len(scores)))
        if all(grades[a] >= grades[b] for a, b in pairwise(order))
    ]
    return -math.log(math.fsum(order_probability(scores, order) for order in allowed))


@pytest.fixture
def ranked(rng):
    """Ragged groups with ties, one of them all ties, as the losses take them."""
    sizes, levels = [2, 5, 3, 7, 4], 3
    grades = torch.cat([torch.randint(levels, (n,), generator=rng) for n in sizes]).double()
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    grades[ids == 2] = 0.1
    lengths = torch.randint(1, 30, (len(ids),), generator=rng).double()
    logprobs = -lengths * (0.1 + torch.rand(len(ids), generator=rng, dtype=torch.float64))
    reference = logprobs + torch.randn(len(ids), generator=rng, dtype=torch.float64)
    return RankedInputs(logprobs.requires_grad_(), lengths, grades, ids, len(sizes), reference)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("levels", [1, 2, 3, 7])
def test_plackett_luce_is_the_sum_over_all_orders_that_ties_allow(spread, levels, rng):
    for size in (2, 4, 7):
        scores = spread * torch.randn(size, generator=rng, dtype=torch.float64)
        grades = torch.randint(levels, (size,), generator=rng).double()
        found = plackett_luce(scores, grades, torch.zeros(size, dtype=torch.int64), 1)
        expected = brute_force(scores.tolist(), grades.tolist())
        torch.testing.assert_close(found.item(), expected, rtol=1e-10, atol=1e-10)


def test_plackett_luce_of_two_responses_is_dpos_loss_and_takes_any_number_of_ties():
    two = plackett_luce(
        torch.tensor([1.0, -0.5]), torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), 1
    )
    torch.testing.assert_close(two.item(), math.log1p(math.exp(-1.5)), rtol=1e-6, atol=0)

    # 60 equal winners against one loser of the same strength: it comes last with probability 1 / 61.
    scores, grades = torch.zeros(61, dtype=torch.float64), torch.tensor([1.0] * 60 + [0.0])
    many = plackett_luce(scores, grades, torch.zeros(61, dtype=torch.int64), 1)
    torch.testing.assert_close(many.item(), math.log(61))


def test_plackett_luce_keeps_groups_apart(ranked):
    together = plackett_luce(ranked.logprobs, ranked.grades, ranked.group_ids, ranked.num_groups)
    for group in range(ranked.num_groups):
        own = ranked.group_ids == group
        alone = plackett_luce(
            ranked.logprobs[own], ranked.grades[own], torch.zeros(int(own.sum()), dtype=int), 1
        )
        torch.testing.assert_close(together[group], alone[0])


@pytest.mark.parametrize("gap", [-2000.0, 2000.0])
def test_plackett_luce_stays_finite_for_extreme_scores(gap):
    scores = torch.tensor([gap, 0.0, gap, 1.0], requires_grad=True)
    loss = plackett_luce(scores, torch.tensor([2.0, 2.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64), 1)
    loss.sum().backward()
    assert loss.isfinite().all() and scores.grad.isfinite().all()


def test_the_pairwise_loss_is_the_mean_over_pairs_of_different_grade(ranked):
    found = pairwise_logistic(ranked.logprobs, ranked.grades, ranked.group_ids, ranked.num_groups)
    for group in range(ranked.num_groups):
        own = (ranked.group_ids == group).nonzero().flatten().tolist()
        terms = [
            math.log1p(math.exp(-(ranked.logprobs[i] - ranked.logprobs[j]).item()))
            for i in own
            for j in own
            if ranked.grades[i] > ranked.grades[j]
        ]
        expected = sum(terms) / len(terms) if terms else 0.0
        torch.testing.assert_close(found[group].item(), expected)


def test_advantages_are_standardised_in_their_group_and_zero_where_all_tie(ranked):
    advantages = grade_advantages(ranked.grades, ranked.group_ids, ranked.num_groups)
    for group in range(ranked.num_groups):
        own, grades = advantages[ranked.group_ids == group], ranked.grades[ranked.group_ids == group]
        if grades.unique().numel() == 1:
            assert own.eq(0).all()
        else:
            torch.testing.assert_close(own, (grades - grades.mean()) / grades.std(correction=0))


def test_the_advantage_objective_clips_the_ratio_to_the_policy_that_wrote_the_response(ranked):
    written = ranked.ref_logprobs + 0.3 * ranked.lengths
    written[::2] = torch.nan  # not recorded: the reference stands in
    inputs = replace(ranked, behaviour_logprobs=written)
    config = RankingLossConfig("advantage", epsilon_low=0.1, epsilon_high=0.3)

    loss = ranking_loss(inputs, config).loss

    advantages = grade_advantages(ranked.grades, ranked.group_ids, ranked.num_groups)
    sums = [0.0] * ranked.num_groups
    for i, group in enumerate(ranked.group_ids.tolist()):
        behaviour = ranked.ref_logprobs[i] if i % 2 == 0 else written[i]
        ratio = math.exp(((ranked.logprobs[i] - behaviour) / ranked.lengths[i]).item())
        a = advantages[i].item()
        size = (ranked.group_ids == group).sum().item()
        sums[group] -= min(ratio * a, min(max(ratio, 0.9), 1.3) * a) / size
    torch.testing.assert_close(loss.item(), sum(sums) / len(sums))


def test_the_weighted_likelihood_prefers_better_responses_and_leaves_all_ties_out(ranked):
    config = RankingLossConfig("advantage_likelihood", temperature=0.5, length_normalised=True)
    (gradient,) = torch.autograd.grad(ranking_loss(ranked, config).loss, ranked.logprobs)
    assert gradient[ranked.group_ids == 2].eq(0).all()
    advantages = grade_advantages(ranked.grades, ranked.group_ids, ranked.num_groups)
    weights = -gradient * ranked.lengths * ranked.num_groups
    for group in set(range(ranked.num_groups)) - {2}:
        own = ranked.group_ids == group
        if ranked.grades[own].unique().numel() > 1:
            torch.testing.assert_close(weights[own], torch.softmax(advantages[own] / 0.5, dim=0))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_agree_with_finite_differences(objective, ranked):
    config = RankingLossConfig(objective)
    assert torch.autograd.gradcheck(
        lambda logprobs: ranking_loss(replace(ranked, logprobs=logprobs), config).loss, (ranked.logprobs,)
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_add_up_to_the_step(objective, ranked, rng):
    weights = torch.rand(ranked.num_groups, generator=rng, dtype=torch.float64)
    ranked, config = replace(ranked, weights=weights), RankingLossConfig(objective)

    def part(first: int, last: int) -> RankedInputs:
        own = (ranked.group_ids >= first) & (ranked.group_ids < last)
        return RankedInputs(
            ranked.logprobs[own],
            ranked.lengths[own],
            ranked.grades[own],
            ranked.group_ids[own] - first,
            last - first,
            ranked.ref_logprobs[own],
            weights=weights[first:last],
            total_groups=ranked.num_groups,
        )

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
def test_contradictory_constants_and_a_missing_reference_are_refused_by_name(arguments, said, ranked):
    with pytest.raises(ValueError, match=said):
        RankingLossConfig(**arguments)
    with pytest.raises(ValueError, match="ref_logprobs is None"):
        ranking_loss(replace(ranked, ref_logprobs=None), RankingLossConfig())
