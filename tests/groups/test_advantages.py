"""Advantages against the papers' formulas, written down one completion at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_fast.groups.advantages import (
    decoupled_advantages,
    group_advantages,
    length_reward_correlation,
    spread_within,
)

NAN = math.nan


@pytest.fixture
def randn(rng):
    return lambda *shape: torch.randn(*shape, generator=rng)


EPS = 0.3  # large enough to show


def by_hand(group: Tensor, everything: Tensor, scale_rewards: str, baseline: str) -> Tensor:
    """Advantages of one group, NaN: no reward, where the whole batch has the rewards `everything`."""
    scored = group[group.isfinite()]
    base = scored.mean() if baseline == "mean" else (scored.sum() - group) / (len(scored) - 1)
    scale = {"none": 1.0, "group": scored.std() + EPS, "batch": everything.std() + EPS}[scale_rewards]
    return ((group - base) / scale).nan_to_num(0.0)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("shared", [None, [7, -3, 7, 0, -3, 7]], ids=["own", "shared"])
def test_an_advantage_compares_a_reward_with_those_that_share_its_baseline(
    scale_rewards, baseline, shared, randn
):
    rewards = randn(6, 4)
    rewards[1, 2] = rewards[4, 0] = NAN

    result = group_advantages(
        rewards, baseline_groups=shared, scale_rewards=scale_rewards, baseline=baseline, eps=EPS
    )

    everything = rewards[rewards.isfinite()]
    keys = shared or list(range(6))
    for key in set(keys):
        rows = [i for i, own in enumerate(keys) if own == key]
        expected = by_hand(rewards[rows].flatten(), everything, scale_rewards, baseline)
        torch.testing.assert_close(result.advantages[rows].flatten(), expected, rtol=1e-4, atol=1e-5)
    assert not result.flat.any()


def test_whitening_counts_no_missing_reward(randn, rng):
    rewards = randn(5, 4)
    rewards[1], rewards[3, 2] = 0.7, NAN  # a flat group is whitened, too
    centred, known = rewards - rewards.nanmean(1, keepdim=True), rewards.isfinite()
    for lengths in (None, torch.randint(1, 30, (5, 4), generator=rng)):
        found = group_advantages(rewards, scale_rewards="whiten", eps=EPS, lengths=lengths).advantages

        tokens = centred[known].repeat_interleave(1 if lengths is None else lengths[known])
        expected = (centred - tokens.mean()) / (tokens.var() + EPS**2).sqrt()
        torch.testing.assert_close(found, expected.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_equal_rewards_or_of_one_or_none_is_flat(baseline):
    rewards = torch.tensor([[0.9, 0.9, 0.9], [NAN, 1.0, NAN], [NAN, NAN, NAN], [0.0, 1.0, 0.0]])
    result = group_advantages(rewards, baseline=baseline)
    assert result.flat.tolist() == [True, True, True, False]
    assert not result.advantages[:3].any() and result.advantages[3].any()


def test_a_group_is_flat_where_each_reward_scaled_by_itself_is(randn):
    table = torch.ones(3, 4, 2)
    table[1, :, 0], table[2] = randn(4), randn(4, 2)
    assert decoupled_advantages(table, [1.0, 0.5]).flat.tolist() == [True, False, False]


def test_without_weight_or_reward_gdpo_has_no_advantage(randn):
    weightless = decoupled_advantages(torch.stack([randn(2, 3), torch.ones(2, 3)], dim=-1), [0.0, 1.0])
    table = randn(2, 3, 2)
    table[0, 1] = NAN
    advantages = decoupled_advantages(table, [1.0, 1.0]).advantages
    assert decoupled_advantages(table[..., :1], [1.0]).advantages.isfinite().all()  # of one reward
    assert weightless.flat.all() and not weightless.advantages.any()
    assert advantages[0, 1] == 0 and advantages.isfinite().all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: group_advantages(torch.zeros(4, 1)), "at least two completions"),
        (lambda: group_advantages(torch.zeros(5, 2), lengths=torch.ones(10)), "lengths has shape"),
        (lambda: group_advantages(torch.zeros(5, 2), baseline_groups=[0, 1]), "2 entries for 5 prompts"),
        (lambda: decoupled_advantages(torch.zeros(2, 3, 3), [1.0, 1.0]), "2 weights"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_the_correlation_is_pearsons_of_the_differences_within_groups(rng, randn):
    lengths = torch.randint(1, 50, (6, 5), generator=rng).float()
    rewards = randn(6, 5) + lengths / 30
    rewards[2, 3] = NAN
    pairs = []
    for length, reward in zip(lengths, rewards, strict=True):
        kept = reward.isfinite()
        pairs += zip(length[kept] - length[kept].mean(), reward[kept] - reward[kept].mean(), strict=True)
    expected = torch.corrcoef(torch.tensor(pairs).T.double())[0, 1].item()
    assert length_reward_correlation(lengths, rewards) == pytest.approx(expected, abs=1e-5)


def test_without_differences_within_groups_there_is_no_correlation():
    lengths = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert length_reward_correlation(lengths, torch.ones(2, 2)) is None
    assert length_reward_correlation(torch.ones(2, 2), lengths) is None
    assert length_reward_correlation(lengths, torch.full((2, 2), NAN)) is None


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [
        ([[NAN, 1, 2, 3], [NAN, 1, 2, 3]], 1.0),
        ([[NAN, 1, 2, 3], [5, NAN, NAN, NAN], [NAN] * 4, [2, 2, 2, 2]], 0.5),
        ([[NAN, 1], [NAN, NAN]], 0.0),
        ([[NAN, NAN]], NAN),
    ],
)
def test_the_spread_is_of_the_rewards_that_each_group_has(rewards, spread):
    assert spread_within(torch.tensor(rewards)) == pytest.approx(spread, nan_ok=True)
