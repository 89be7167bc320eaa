from __future__ import annotations

import pytest
import torch

from grpo_fast.groups import group_advantages
from grpo_fast.groups.advantages import decoupled_advantages, weighted_sum


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


def spread_over(
    groups: list[list[float]], config: dict[str, str], everything: list[float]
) -> list[list[float]]:
    """Advantages written down by hand, one group at a time; NaN: no reward."""
    result = []
    for group in groups:
        scored = [value for value in group if value == value]
        mean = sum(scored) / len(scored)
        deviation = (sum((value - mean) ** 2 for value in scored) / (len(scored) - 1)) ** 0.5
        if config["scale_rewards"] == "batch":
            center = sum(everything) / len(everything)
            deviation = (sum((v - center) ** 2 for v in everything) / (len(everything) - 1)) ** 0.5
        scale = 1.0 if config["scale_rewards"] == "none" else deviation + 1e-4
        row = []
        for value in group:
            others = (sum(scored) - value) / (len(scored) - 1)
            base = others if config["baseline"] == "leave_one_out" else mean
            row.append((value - base) / scale if value == value else 0.0)
        result.append(row)
    return result


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_prompts_that_share_a_baseline_are_one_group_of_all_their_completions(scale_rewards, baseline):
    rewards = random_rewards(6, 4)
    rewards[1, 2] = rewards[4, 0] = float("nan")
    shared = [7, -3, 7, 0, -3, 7]
    config = {"scale_rewards": scale_rewards, "baseline": baseline}

    result = group_advantages(rewards, shared=shared, **config)

    everything = rewards[rewards.isfinite()].double().tolist()
    for key in set(shared):
        rows = [i for i, own in enumerate(shared) if own == key]
        flat = rewards[rows].double().flatten().tolist()
        (expected,) = spread_over([flat], config, everything)
        torch.testing.assert_close(
            result.advantages[rows].flatten(), torch.tensor(expected), rtol=1e-4, atol=1e-5
        )
        valid = rewards[rows][rewards[rows].isfinite()]
        torch.testing.assert_close(result.mean[rows], valid.mean().expand(len(rows)))
        torch.testing.assert_close(result.std[rows], valid.std().expand(len(rows)))


def test_a_shared_baseline_lets_prompts_learn_whose_own_completions_all_earn_the_same():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    result = group_advantages(rewards, shared=[0, 0, 1])
    assert result.flat.tolist() == [False, False, True]
    assert (result.advantages[0] > 0).all() and (result.advantages[1] < 0).all()
    assert result.advantages[2].tolist() == [0.0, 0.0]


def test_without_sharing_the_result_is_that_of_distinct_baselines():
    rewards = random_rewards()
    alone, distinct = group_advantages(rewards), group_advantages(rewards, shared=[4, 2, 9, 0, 1])
    for name in ("advantages", "flat", "mean", "std"):
        assert torch.equal(getattr(alone, name), getattr(distinct, name))


def test_baselines_of_another_count_are_refused():
    with pytest.raises(ValueError, match="2 entries for 5 prompts"):
        group_advantages(random_rewards(), shared=[0, 1])


def test_normalise_then_sum_is_gdpo_written_by_hand():
    table = torch.stack([random_rewards(4, 5) * 100, random_rewards(4, 5) + 3, random_rewards(4, 5)], dim=-1)
    table[2, 1, 2] = float("nan")
    weights = [0.5, 2.0, -1.0]

    result = decoupled_advantages(table, weights).advantages

    summed = []
    for group in table.double():
        columns = [column.tolist() for column in group.T]
        config = {"scale_rewards": "group", "baseline": "mean"}
        parts = [spread_over([column], config, [])[0] for column in columns]
        summed += [sum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in range(5)]
    expected = torch.tensor(summed, dtype=torch.float64).view(4, 5)
    torch.testing.assert_close(result.double(), expected / (expected.std() + 1e-4), rtol=1e-4, atol=1e-5)


def test_normalise_then_sum_tells_apart_what_a_sum_would_make_equal():
    # Totals are 1, 1, 0: a sum cannot prefer the rare success to the common one.
    table = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    summed = group_advantages(weighted_sum(table, [1.0, 1.0])).advantages[0]
    decoupled = decoupled_advantages(table, [1.0, 1.0]).advantages[0]
    assert summed[0] == summed[2]
    assert decoupled[2] > decoupled[0] > decoupled[3]


def test_a_reward_of_no_weight_keeps_no_group_alive_when_each_is_scaled_by_itself():
    table = torch.stack([random_rewards(2, 3), torch.ones(2, 3)], dim=-1)
    result = decoupled_advantages(table, [0.0, 1.0])
    assert result.flat.tolist() == [True, True] and not result.advantages.any()


def test_a_completion_without_any_reward_has_no_advantage_when_each_is_scaled_by_itself():
    table = torch.stack([random_rewards(2, 3), random_rewards(2, 3)], dim=-1)
    table[0, 1] = float("nan")
    result = decoupled_advantages(table, [1.0, 1.0])
    assert result.advantages[0, 1] == 0 and result.advantages.isfinite().all()


def test_a_weighted_sum_leaves_out_what_does_not_apply():
    nan = float("nan")
    table = torch.tensor([[1.0, 2.0], [nan, 2.0], [nan, nan]])
    torch.testing.assert_close(weighted_sum(table, [3.0, 0.5]), torch.tensor([4.0, 1.0, nan]), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3)])
def test_a_table_that_does_not_fit_the_weights_is_refused(shape):
    with pytest.raises(ValueError, match="2 weights; pass"):
        decoupled_advantages(torch.zeros(shape), [1.0, 1.0])
