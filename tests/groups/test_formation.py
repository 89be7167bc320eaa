"""Groups of prompts: what each strategy promises, and clusters against a search one prompt at a time."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.groups import formation
from grpo_fast.groups.config import CriterionConfig, GroupConfig
from grpo_fast.groups.formation import form_groups, key_groups, leader_clusters, settle_leftovers

TOPIC = "def topic(prompts):\n    return [p.columns['topic'] for p in prompts]\n"


def strategies(write_module) -> dict[str, GroupConfig]:
    criteria = [CriterionConfig(by="embedding"), CriterionConfig(by="column:level", weight=0.3)]
    return {
        "prompt": GroupConfig(),
        "similarity": GroupConfig(strategy="similarity", similarity_threshold=0.2),
        "nearest": GroupConfig(strategy="similarity", similarity_threshold=0.3, leftovers="nearest"),
        "combined": GroupConfig(strategy="combined", criteria=criteria, similarity_threshold=0.3),
        "own": GroupConfig(strategy=write_module("topic", TOPIC), min_group_size=3, max_group_size=5),
    }


@pytest.mark.parametrize("name", ["prompt", "similarity", "nearest", "combined", "own"])
def test_every_strategy_puts_every_prompt_into_one_group_of_allowed_size(make_prompts, write_module, name):
    prompts = make_prompts(50)
    config = strategies(write_module)[name]

    grouping = form_groups(prompts, config)

    assert sorted(position for group in grouping.members for position in group) == list(range(50))
    sizes = {len(group) for group in grouping.members}
    assert sizes <= {1, *range(config.min_group_size, config.max_group_size + 1)}
    assert (sizes == {1}) == (name == "prompt")


def test_members_are_as_similar_to_their_leader_as_the_threshold_says(make_prompts):
    prompts = make_prompts(60)
    grouping = form_groups(prompts, GroupConfig(strategy="similarity", similarity_threshold=0.25))
    for group in grouping.members:
        places = torch.tensor(group)
        assert grouping.likeness.distance(places[:1], places).max() <= 0.75 + 1e-5


def conversations(count: int, rng: random.Random) -> list[Prompt]:
    """Prompts of a few conversations at the same depth, with a system message and one example before."""
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]
    start += [{"role": "assistant", "content": "x"}]
    prompts = []
    for index in range(count):
        story = rng.randrange(4)
        own = [{"role": "user", "content": f"story {story}"}, {"role": "assistant", "content": "yes"}]
        own = own if story else []  # story 0 has no earlier turns
        prompts.append(Prompt(index, [*start, *own, {"role": "user", "content": f"ask {index}"}], (1,), {}))
    return prompts


def test_prompts_of_one_conversation_share_a_baseline_and_others_keep_their_own(seed):
    prompts = conversations(40, random.Random(seed))
    grouping = form_groups(prompts, GroupConfig(strategy="prefix", max_group_size=40), example_turns=2)
    for group in grouping.members:
        stories = {prompts[position].prompt[3]["content"] for position in group}
        assert len(stories) == 1
        assert len(group) == 1 or not stories.pop().startswith("ask")


def test_a_batch_shares_what_of_its_groups_it_holds(make_prompts, write_module):
    prompts = make_prompts(30, topics=2)
    topic = GroupConfig(strategy=write_module("topic", TOPIC), min_group_size=2, max_group_size=30)
    grouping = form_groups(prompts, topic)
    first = [p for p in prompts if p.columns["topic"] == "t0"]
    second = [p for p in prompts if p.columns["topic"] == "t1"]

    a, b, c, d = grouping.baseline_groups([first[0], second[0], first[1], first[2]])

    assert a == c == d != b
    both = grouping.baseline_groups([first[0], second[0], second[1]])  # two suffice
    assert both[1] == both[2] != both[0]
    alone = grouping.baseline_groups([first[0], second[0]])
    assert len(set(alone)) == 2 and min(alone) < 0 <= a


def test_the_spread_of_a_group_is_the_mean_distance_of_its_pairs(make_prompts):
    prompts = make_prompts(10)
    grouping = form_groups(prompts, GroupConfig(strategy="similarity"))
    places = [1, 4, 7]
    pairs = [
        grouping.likeness.distance(torch.tensor([a]), torch.tensor([b])).item()
        for a in places
        for b in places
        if a != b
    ]
    assert grouping.spread(places) == pytest.approx(sum(pairs) / 6, abs=1e-5)
    assert grouping.spread([1]) is None
    assert form_groups(prompts, GroupConfig()).spread(places) is None


def test_a_prefix_strategy_without_conversations_is_refused(make_prompts):
    with pytest.raises(ValueError, match=r"no prompt with earlier turns.*use another strategy"):
        form_groups(make_prompts(3), GroupConfig(strategy="prefix"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1, 2]", "2 keys for 3 prompts"),
        ("{1, 2, 3}", "a set"),
        ("[[], 1, 2]", "a list for prompt 0"),
    ],
)
def test_a_strategy_that_returns_no_key_for_each_prompt_is_refused(make_prompts, write_module, body, message):
    path = write_module("wrong", f"def wrong(prompts):\n    return {body}\n")
    with pytest.raises(ValueError, match=message):
        form_groups(make_prompts(3), GroupConfig(strategy=path))


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
        if near and min(near)[0] <= radius + formation.ROUNDING:
            groups[min(near)[1]].append(i)
        else:
            groups.append([i])
    return groups


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("max_size", [1, 3, 100])
@pytest.mark.parametrize("radius", [0.0, 0.1, 0.3, 2.0])
def test_the_clusters_are_those_of_looking_at_one_prompt_after_the_other(
    points, monkeypatch, block, max_size, radius
):
    monkeypatch.setattr(formation, "BLOCK", block)
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


def test_a_leftover_goes_to_the_nearest_group_with_room_if_asked_and_is_alone_otherwise():
    line = torch.tensor([[0.0, 0.0], [0.1, 0.0], [1.0, 0.0], [1.1, 0.0], [0.4, 0.0], [0.45, 0.0]])

    def settle(groups: list[list[int]], nearest: bool, min_size: int = 2) -> list[list[int]]:
        return settle_leftovers(groups, distance_of(line), min_size=min_size, max_size=3, nearest=nearest)

    groups = [[0, 1], [2, 3], [4], [5]]
    assert settle(groups, nearest=True) == [[0, 1, 4], [2, 3, 5]]
    assert settle(groups, nearest=False) == groups
    assert settle([[0, 1], [2]], nearest=True, min_size=3) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("labels", "min_size", "expected"),
    [
        ([5, 5, 5, 5, 5, 2, 5, 2, 9], 2, [[0, 1, 2], [3, 4, 6], [5, 7], [8]]),
        ([1, 1, 2, 2, 2], 3, [[0], [1], [2, 3, 4]]),
        ([7, 7, 7, 7], 2, [[0, 1, 2, 3]]),
    ],
)
def test_keys_make_even_parts_and_those_below_the_smallest_size_fall_apart(labels, min_size, expected):
    assert key_groups(labels, min_size=min_size, max_size=4) == expected
