from __future__ import annotations

import pytest
import torch

from grpo_fast.groups import clusters
from grpo_fast.groups.clusters import key_groups, leader_clusters, settle_leftovers


@pytest.fixture
def points(seed: int) -> torch.Tensor:
    return torch.rand(60, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table_of(points: torch.Tensor) -> torch.Tensor:
    """By differences: the products that `cdist` may take instead find points close to each other equal."""
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def distance_of(points: torch.Tensor):
    table = table_of(points)
    return lambda rows, others: table[rows][:, others]


def one_by_one(points: torch.Tensor, radius: float, max_size: int) -> list[list[int]]:
    groups: list[list[int]] = []
    table = table_of(points).tolist()
    for i in range(len(points)):
        near = [(table[i][g[0]], k) for k, g in enumerate(groups) if len(g) < max_size]
        if near and min(near)[0] <= radius + clusters.ROUNDING:
            groups[min(near)[1]].append(i)
        else:
            groups.append([i])
    return groups


@pytest.mark.parametrize("block", [1, 7, 60, 256])
@pytest.mark.parametrize("max_size", [1, 3, 100])
@pytest.mark.parametrize("radius", [0.0, 0.1, 0.3, 2.0])
def test_the_clusters_are_those_of_looking_at_one_prompt_after_the_other(
    points, monkeypatch, block, max_size, radius
):
    monkeypatch.setattr(clusters, "BLOCK", block)
    found = leader_clusters(len(points), distance_of(points), radius=radius, max_size=max_size)
    assert found == one_by_one(points, radius, max_size)


@pytest.mark.parametrize("nearest", [False, True])
def test_settling_leftovers_loses_no_prompt_and_keeps_the_size_limits(points, nearest):
    groups = leader_clusters(60, distance_of(points), radius=0.15, max_size=5)

    settled = settle_leftovers(groups, distance_of(points), min_size=3, max_size=5, nearest=nearest)

    assert sorted(position for group in settled for position in group) == list(range(60))
    assert all(len(group) == 1 or 3 <= len(group) <= 5 for group in settled)
    kept = [group for group in groups if len(group) >= 3]
    assert all(after[: len(before)] == before for before, after in zip(kept, settled, strict=False))


def test_leftovers_keep_a_baseline_of_their_own_unless_asked_otherwise(points):
    groups = [[0, 1, 2], [3, 4], [5]]
    settled = settle_leftovers(groups, distance_of(points), min_size=3, max_size=9, nearest=False)
    assert settled == [[0, 1, 2], [3], [4], [5]]


def test_a_leftover_goes_to_the_nearest_group_with_room():
    line = torch.tensor([[0.0, 0.0], [0.1, 0.0], [1.0, 0.0], [1.1, 0.0], [0.4, 0.0], [0.45, 0.0]])
    groups = [[0, 1], [2, 3], [4], [5]]
    settled = settle_leftovers(groups, distance_of(line), min_size=2, max_size=3, nearest=True)
    assert settled == [[0, 1, 4], [2, 3, 5]]


def test_without_any_group_large_enough_everybody_is_alone(points):
    groups = settle_leftovers([[0, 1], [2]], distance_of(points), min_size=3, max_size=3, nearest=True)
    assert groups == [[0], [1], [2]]


def test_keys_make_groups_of_even_parts():
    assert key_groups([5, 5, 5, 5, 5, 2, 5, 2, 9], min_size=2, max_size=4) == [
        [0, 1, 2],
        [3, 4, 6],
        [5, 7],
        [8],
    ]


def test_parts_below_the_smallest_size_fall_apart():
    assert key_groups([1, 1, 2, 2, 2], min_size=3, max_size=4) == [[0], [1], [2, 3, 4]]
