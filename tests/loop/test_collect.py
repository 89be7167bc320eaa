"""A rollout and what it earned: completions observed, scored, compared with those of their prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast.config.groups import AdvantageConfig
from grpo_fast.data import Prompt
from grpo_fast.data.table import CompletionTable
from grpo_fast.groups.advantages import decoupled_advantages, group_advantages
from grpo_fast.loop.collect import describe, groups_of, score, to_train, with_advantages
from grpo_fast.objective import GRPOLossConfig
from grpo_fast.rewards import Reward, RewardSet
from grpo_fast.rollout import Completion, Episode


@pytest.fixture
def table(rng) -> torch.Tensor:
    """Four prompts with three completions each, and two rewards."""
    return torch.randn(4, 3, 2, generator=rng)


@pytest.fixture
def scored(table):
    """Reads the rewards off the table; each completion is one token longer than the one before."""
    prompts = [Prompt(i, f"question {i}", (1, 2), {}) for i in range(4)]
    completions = [
        tuple(Completion((5,) * (1 + i + j), (-1.0,) * (1 + i + j), f"{i} {j}", False) for j in range(3))
        for i in range(4)
    ]

    def column(index: int):
        return lambda completions: [table[int(c[0]), int(c[2]), index].item() for c in completions]

    rewards = RewardSet([Reward("first", column(0), 2.0), Reward("second", column(1), -0.5)])

    def scored(config: AdvantageConfig, weights=None, baseline_groups=None) -> CompletionTable:
        found = score(prompts, completions, rewards, weights=weights)
        return with_advantages(found, config, weights or rewards.weights, baseline_groups)

    return scored


PLAIN = {"baseline": "leave_one_out", "scale_rewards": "none"}


@pytest.mark.parametrize(
    ("config", "weights", "baseline_groups"),
    [
        ({}, None, None),
        (PLAIN, (1.0, 3.0), [0, 1, 0, 2]),
        ({"multi_objective_aggregation": "normalize_then_sum"}, None, [0, 0, 1, 1]),
        ({"scale_rewards": "whiten"}, None, None),
    ],
)
def test_rewards_are_weighted_and_compared_within_each_baseline_group(
    table, scored, config, weights, baseline_groups
):
    found = scored(AdvantageConfig(**config), weights, baseline_groups)

    totals = (table * torch.tensor(weights or (2.0, -0.5))).sum(-1)
    torch.testing.assert_close(found.by_group("reward"), totals)
    if "multi_objective_aggregation" in config:
        expected = decoupled_advantages(table, (2.0, -0.5), baseline_groups=baseline_groups)
    else:
        lengths = torch.arange(1, 5)[:, None] + torch.arange(3)
        expected = group_advantages(totals, **config, baseline_groups=baseline_groups, lengths=lengths)
    torch.testing.assert_close(found.by_group("advantage"), expected.advantages)


@pytest.mark.parametrize(
    ("advantage", "loss", "kept"),
    [
        ({}, {}, False),
        ({}, {"beta": 0.1, "kl_in_reward": True}, False),
        ({}, {"beta": 0.1}, True),
        ({}, {"entropy_coef": 0.01}, True),
        ({}, {"loss_type": "clip_cov"}, True),
        ({}, {"loss_type": "my.module:loss"}, True),
        ({"scale_rewards": "whiten"}, {}, True),
        ({"skip_flat_groups": True}, {"beta": 0.1}, False),
        ({"skip_flat_groups": False}, {}, True),
    ],
    ids=str,
)
def test_a_flat_group_leaves_where_it_would_change_nothing_but_the_cost(scored, table, advantage, loss, kept):
    table[1] = 0.25
    config = AdvantageConfig(**advantage)
    chosen, totals = to_train(scored(config), config, GRPOLossConfig(**loss))
    assert {*chosen.groups.tolist()} == {0, 2, 3} | ({1} if kept else set())
    assert (totals.num_sequences, totals.num_tokens) == (12, 42)  # of all groups


def test_the_last_group_with_spread_makes_up_for_all_and_none_for_none(scored, table):
    table[1:] = 0.25
    plain, rescaled = (
        scored(AdvantageConfig(rescale_flat_groups=on)).facts["advantage"][:3] for on in (False, True)
    )
    torch.testing.assert_close(rescaled, 4 * plain)
    table[:] = 0.25
    assert not scored(AdvantageConfig(rescale_flat_groups=True)).facts["advantage"].any()


@pytest.fixture
def function(tmp_path):
    """The import path of a user's function of groups and rewards that returns `row` for each group i."""

    def function(row: str) -> str:
        file = tmp_path / "own.py"
        file.write_text(f"def own(groups, rewards):\n    return [{row} for i in range(len(groups))]\n")
        return f"{file}:own"

    return function


def test_groups_are_flat_where_a_users_function_gives_nothing_but_zeros(scored, function):
    row = "[float(i == 0), [0.0] * (1 + i) + [float(i == 2)], 0]"  # of the 1 + i + j tokens of completion j
    config = AdvantageConfig(function=function(row), skip_flat_groups=False)
    found = scored(config)
    assert found.by_group("flat")[:, 0].tolist() == [False, True, False, True]
    assert [group.flat for group in groups_of(found)] == [False, True, False, True]
    chosen, _ = to_train(found, config, GRPOLossConfig())
    third = chosen.select_groups([2])
    assert third.columns["advantages"].tolist() == [0.0] * 3 + [0.0, 0.0, 0.0, 1.0] + [0.0] * 5
    assert third.facts["advantage"].tolist() == [0.0, 0.25, 0.0]


@pytest.mark.parametrize("row", ["[0.0] * 2", "[0.0] * 4", "[0.0, [0.0] * 2, [0.0] * 2]"])
def test_advantages_of_the_wrong_shape_are_refused(scored, function, row):
    with pytest.raises(ValueError, match=r"advantage\.function = .* values for completions of \[1, 2, 3\]"):
        scored(AdvantageConfig(function=function(row)))


def test_metrics_of_groups_include_how_length_and_reward_correlate(scored, table):
    found = scored(AdvantageConfig())
    twice = found.select([0, 1, 2, 3, 3, 5, *range(6, 12)])  # the second group's first completion
    flat, truncated = (torch.zeros(12, dtype=torch.bool) for _ in range(2))
    flat[3:6] = truncated[5] = True
    found = twice.with_facts(
        flat=flat,
        truncated=truncated,
        reward=found.facts["reward"],
        reward_table=found.facts["reward_table"],
    )
    lengths = found.lengths.view(4, 3).double()
    rewards = found.by_group("reward").double()
    centred = [(values - values.mean(1, keepdim=True)).flatten() for values in (lengths, rewards)]
    assert describe(found, ("first", "second")) == pytest.approx(
        {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std(1).mean().item(),
            "reward/first/mean": table[..., 0].mean().item(),
            "reward/second/mean": table[..., 1].mean().item(),
            "groups/flat": 1 / 4,
            "groups/unique_completions": (3 + 1 / 2) / 4,
            "completion/length_mean": lengths.mean().item(),
            "completion/length_max": 6,
            "completion/truncated": 1 / 12,
            "completion/length_reward_correlation": torch.corrcoef(torch.stack(centred))[0, 1].item(),
        },
        abs=1e-4,
    )


def test_an_environments_tokens_are_masked_and_the_environment_is_not_kept(scored, table):
    told = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant"})
    episode = Episode("longer?", (1, 2, 3), (True, False, True), told, object(), 3, 1, 2)
    prompts = [Prompt(0, "?", (1, 2), {})]
    played = Completion((5, 6, 7), (-1.0, 0.0, -1.0), "", False, episode)
    single = replace(
        played,
        episode=replace(
            episode, sampled=(True,) * 3, messages=told[:1], tool_calls=0, tool_failures=0, tools_given_up=0
        ),
    )
    rewards = RewardSet([Reward("one", lambda environments: [float(e is not None) for e in environments])])

    found = with_advantages(score(prompts, [[played, single]], rewards), AdvantageConfig(), (1.0,))
    metrics = describe(found, ("one",))
    samples, totals = to_train(found, AdvantageConfig(skip_flat_groups=False), GRPOLossConfig())

    assert metrics["reward/mean"] == 1.0 and all(
        completion.episode.environment is None for completion in found.objects["completion"]
    )
    assert (metrics["turns/mean"], metrics["tools/calls"], metrics["tools/failures"]) == (1.5, 1.5, 1 / 3)
    assert metrics["tools/given_up"] == 2 / 3
    assert (metrics["completion/length_mean"], totals.num_tokens) == (2.5, 5)
    assert samples.prompts.tolist() == [0, 0] and samples.prompt_ids.tolist() == [1, 2, 3]
    assert samples.mask.tolist() == [True, False, True, True, True, True]
    assert found.objects["prompt"][0].prompt == "longer?"
