from __future__ import annotations

import pytest
import torch

from grpo_fast.groups.quality import length_reward_correlation


def test_the_correlation_is_pearsons_of_the_differences_within_groups(rng):
    lengths = torch.randint(1, 50, (6, 5), generator=rng).float()
    rewards = torch.randn(6, 5, generator=rng) + lengths / 30
    rewards[2, 3] = float("nan")
    pairs = []
    for length, reward in zip(lengths, rewards, strict=True):
        kept = reward.isfinite()
        pairs += zip(length[kept] - length[kept].mean(), reward[kept] - reward[kept].mean(), strict=True)
    expected = torch.corrcoef(torch.tensor(pairs).T.double())[0, 1].item()
    assert length_reward_correlation(lengths, rewards) == pytest.approx(expected, abs=1e-5)


def test_hard_prompts_with_long_answers_are_no_correlation():
    lengths = torch.tensor([[10.0, 11.0], [90.0, 91.0]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]]) - lengths.mean(1, keepdim=True)
    assert length_reward_correlation(lengths, rewards) == pytest.approx(0)


def test_without_differences_within_groups_there_is_none():
    lengths = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert length_reward_correlation(lengths, torch.ones(2, 2)) is None
    assert length_reward_correlation(torch.ones(2, 2), lengths) is None
    assert length_reward_correlation(lengths, torch.full((2, 2), float("nan"))) is None
