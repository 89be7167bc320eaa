from __future__ import annotations

import pytest
import torch

from grpo_fast.groups import group_advantages


def random_rewards(groups: int = 5, n: int = 6) -> torch.Tensor:
    seed = torch.seed()
    print(f"seed {seed}")
    return torch.randn(groups, n)


def test_group_scaling_centres_each_group_and_gives_it_unit_deviation():
    advantages = group_advantages(random_rewards(), eps=0.0).advantages
    torch.testing.assert_close(advantages.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(1), torch.ones(5))


def test_batch_scaling_divides_by_the_deviation_of_all_rewards():
    rewards = random_rewards()
    advantages = group_advantages(rewards, scale_rewards="batch", eps=0.0).advantages
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std()
    torch.testing.assert_close(advantages, expected)


def test_no_scaling_keeps_the_units_of_the_reward():
    rewards = random_rewards()
    advantages = group_advantages(rewards, scale_rewards="none").advantages
    torch.testing.assert_close(advantages, rewards - rewards.mean(1, keepdim=True))


def test_leave_one_out_compares_each_completion_with_the_mean_of_the_others():
    rewards = random_rewards(3, 4)
    advantages = group_advantages(rewards, scale_rewards="none", baseline="leave_one_out").advantages
    for g in range(3):
        for i in range(4):
            others = torch.cat([rewards[g, :i], rewards[g, i + 1 :]])
            torch.testing.assert_close(advantages[g, i], rewards[g, i] - others.mean())


def test_a_group_of_equal_rewards_is_flat_and_has_no_advantage():
    rewards = torch.tensor([[0.9, 0.9, 0.9], [0.0, 1.0, 0.0]])
    result = group_advantages(rewards)
    assert result.flat.tolist() == [True, False]
    assert result.advantages[0].tolist() == [0.0, 0.0, 0.0]


def test_a_completion_without_a_reward_leaves_the_statistics_of_its_group():
    rewards = torch.tensor([[1.0, float("nan"), 3.0]])
    result = group_advantages(rewards, scale_rewards="none")
    assert result.mean.item() == 2.0
    assert result.advantages.tolist() == [[-1.0, 0.0, 1.0]]


def test_a_group_without_any_reward_is_flat():
    result = group_advantages(torch.full((1, 3), float("nan")))
    assert result.flat.tolist() == [True]
    assert result.advantages.abs().sum() == 0


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_group_of_one_is_refused_with_the_remedy(shape):
    with pytest.raises(ValueError, match="at least two completions"):
        group_advantages(torch.zeros(shape))
