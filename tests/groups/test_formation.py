"""Groups of prompts: what each strategy promises, and clusters against a search one prompt at a time."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.config.groups import CriterionConfig, GroupConfig
from grpo_fast.data import Prompt
from grpo_fast.groups import formation
from grpo_fast.groups.formation import form_groups, key_groups, leader_clusters
from tests.groups.conftest import prompt_distance


@pytest.mark.parametrize("strategy", ["prompt", "similarity", "combined", "own"])
def test_every_strategy_puts_every_prompt_into_one_group_of_allowed_size(
    make_prompts, write_function, strategy
):
    prompts, distance, sizes = make_prompts(50), None, {"min_group_size": 3, "max_group_size": 5}
    criteria = [CriterionConfig(by="embedding"), CriterionConfig(by="column:level", weight=0.3)]
    if strategy in ("similarity", "combined"):
        criteria = criteria if strategy == "combined" else []
        config = GroupConfig(strategy=strategy, criteria=criteria, **sizes)
        distance = prompt_distance(prompts, config)
    elif strategy == "own":
        own = write_function("prompts", "[p.columns['topic'] for p in prompts]")
        config = GroupConfig(strategy=own, **sizes)
    else:
        config = GroupConfig()

    groups = form_groups(prompts, config, distance)

    assert sorted(position for group in groups for position in group) == list(range(50))
    assert {len(group) for group in groups} <= ({1} if strategy == "prompt" else {1, 3, 4, 5})
    for group in map(torch.tensor, groups if distance is not None else ()):
        assert distance(group[:1], group).max() <= 0.6 + 1e-5  # members are near their leader


def test_prompts_of_one_conversation_share_a_baseline(make_prompts):
    turns = [["u1", "a1", "u2"], ["u1"], ["u1", "a1", "u3"], ["u1", "a2", "u2"]]
    prompts = [Prompt(0, [{"role": turn[0], "content": turn} for turn in own], (1,), {}) for own in turns]
    config = GroupConfig(strategy="prefix")
    assert sorted(form_groups(prompts, config)) == [[0, 2], [1], [3]]
    with pytest.raises(ValueError, match=r"no prompt with earlier turns.*use another strategy"):
        form_groups(make_prompts(3), config)


@pytest.mark.parametrize(
    ("keys", "min_size", "expected"),
    [
        ([5, 5, 5, 5, 5, 2, 5, 2, 9], 2, [[0, 1, 2], [3, 4, 6], [5, 7], [8]]),
        ([1, 1, 2, 2, 2], 3, [[0], [1], [2, 3, 4]]),
        ([7, 7, 7, 7], 2, [[0, 1, 2, 3]]),
        ([None, "a", None, "a"], 1, [[0], [1, 3], [2]]),
    ],
)
def test_keys_make_even_parts_and_those_below_the_smallest_size_fall_apart(keys, min_size, expected):
    assert key_groups(keys, GroupConfig(strategy="a:b", min_group_size=min_size)) == expected


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("max_size", [1, 3, 100])
@pytest.mark.parametrize("radius", [0.0, 0.1, 0.3, 2.0])
def test_the_clusters_are_those_of_looking_at_one_prompt_after_the_other(
    rng, monkeypatch, block, max_size, radius
):
    points = torch.rand(60, 2, generator=rng, dtype=torch.float64)
    # By differences: the products that `cdist` may take instead find points close to each other equal.
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    expected: list[list[int]] = []
    for i in range(60):
        near = [(distances[i, g[0]], k) for k, g in enumerate(expected) if len(g) < max_size]
        if near and min(near)[0] <= radius + formation.ROUNDING:
            expected[min(near)[1]].append(i)
        else:
            expected.append([i])

    monkeypatch.setattr(formation, "BLOCK", block)
    found = leader_clusters(
        60, lambda rows, others: distances[rows][:, others], radius=radius, max_size=max_size
    )
    assert found == expected
