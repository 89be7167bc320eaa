"""Groups of prompts: what each strategy promises, and clusters against a search one prompt at a time."""

from __future__ import annotations

import random

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.groups import formation
from grpo_fast.groups.config import CriterionConfig, GroupConfig
from grpo_fast.groups.formation import form_groups, key_groups, leader_clusters, settle_leftovers

COMBINED = [CriterionConfig(by="embedding"), CriterionConfig(by="column:level", weight=0.3)]
STRATEGIES = {
    "prompt": GroupConfig(),
    "similarity": GroupConfig(strategy="similarity", similarity_threshold=0.2),
    "nearest": GroupConfig(strategy="similarity", similarity_threshold=0.3, leftovers="nearest"),
    "combined": GroupConfig(strategy="combined", criteria=COMBINED, similarity_threshold=0.3),
    "own": GroupConfig(strategy="a:b", min_group_size=3, max_group_size=5),
}


@pytest.fixture
def by_topic(write_function) -> GroupConfig:
    strategy = write_function("prompts", "[p.columns['topic'] for p in prompts]")
    return GroupConfig(strategy=strategy, max_group_size=30)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_puts_every_prompt_into_one_group_of_allowed_size(make_prompts, by_topic, name):
    prompts, config = make_prompts(50), STRATEGIES[name]
    strategy = by_topic.strategy if name == "own" else config.strategy

    grouping = form_groups(prompts, config.model_copy(update={"strategy": strategy}))

    assert sorted(position for group in grouping.members for position in group) == list(range(50))
    sizes = {len(group) for group in grouping.members}
    assert sizes <= {1, *range(config.min_group_size, config.max_group_size + 1)}
    assert (sizes == {1}) == (name == "prompt")
    if name in ("similarity", "combined"):  # members are within the threshold of their leader
        for group in map(torch.tensor, grouping.members):
            assert grouping.distance(group[:1], group).max() <= 1 - config.similarity_threshold + 1e-5


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


def test_prompts_of_one_conversation_share_a_baseline_and_others_keep_their_own(seed, make_prompts):
    prompts = conversations(40, random.Random(seed))
    config = GroupConfig(strategy="prefix", max_group_size=40)
    grouping = form_groups(prompts, config, example_turns=2)
    for group in grouping.members:
        stories = {prompts[position].prompt[3]["content"] for position in group}
        assert len(stories) == 1
        assert len(group) == 1 or not stories.pop().startswith("ask")
    with pytest.raises(ValueError, match=r"no prompt with earlier turns.*use another strategy"):
        form_groups(make_prompts(3), config)


def test_a_batch_shares_what_of_its_groups_it_holds(make_prompts, by_topic):
    prompts = make_prompts(30, topics=2)
    grouping = form_groups(prompts, by_topic)
    first = [p for p in prompts if p.columns["topic"] == "t0"]
    second = [p for p in prompts if p.columns["topic"] == "t1"]

    a, b, c, d = grouping.baseline_groups([first[0], second[0], first[1], first[2]])

    assert a == c == d != b
    for one, two, place in ((first, second, 0), (second, first, 0), (first, second, 1), (second, first, 1)):
        batch = two[:2]
        batch.insert(place, one[0])
        both = grouping.baseline_groups(batch)
        alone = both.pop(place)  # no group's number, wherever it stands
        assert both[0] == both[1] != alone  # two suffice
    alone = grouping.baseline_groups([first[0], second[0]])
    assert len(set(alone)) == 2 and min(alone) < 0 <= a


def test_the_spread_of_a_group_is_the_mean_distance_of_its_pairs():
    def distance(rows, others):  # whose diagonal is not zero, as rounding may leave it
        return (rows[:, None] - others[None]).abs().add(0.25).float()

    grouping = formation.Grouping(((1, 4, 9),), tuple(range(10)), distance=distance)

    assert grouping.spread([1, 4, 9]) == pytest.approx((3 + 8 + 5) / 3 + 0.25)
    assert grouping.spread([1, 4]) == pytest.approx(3.25)
    assert grouping.spread([1]) is None
    assert formation.Grouping(((0, 1),), (0, 1)).spread([0, 1]) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [("[1, 2]", "2 keys for 3 prompts"), ("{1, 2, 3}", "a set"), ("[[], 1, 2]", "a list for prompt 0")],
)
def test_a_strategy_that_returns_no_key_for_each_prompt_is_refused(
    make_prompts, write_function, body, message
):
    with pytest.raises(ValueError, match=message):
        form_groups(make_prompts(3), GroupConfig(strategy=write_function("prompts", body)))


@pytest.fixture
def points(rng: torch.Generator) -> torch.Tensor:
    return torch.rand(60, 2, generator=rng, dtype=torch.float64)


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


def settle(groups, points, nearest: bool, min_size: int, max_size: int) -> list[list[int]]:
    leftovers = "nearest" if nearest else "own"
    sizes = {"min_group_size": min_size, "max_group_size": max_size}
    config = GroupConfig(strategy="similarity", leftovers=leftovers, **sizes)
    return settle_leftovers(groups, distance_of(points), config)


@pytest.mark.parametrize("nearest", [False, True])
def test_leftovers_join_the_nearest_group_with_room_if_asked_and_are_alone_otherwise(points, nearest):
    table = table_of(points)
    groups = leader_clusters(60, distance_of(points), radius=0.15, max_size=5)
    expected = [list(group) for group in groups if len(group) >= 3]
    alone = []
    for position in sorted(position for group in groups if len(group) < 3 for position in group):
        room = [group for group in expected if len(group) < 5] if nearest else []
        home = min(room, key=lambda group: table[position, group[0]].item(), default=None)
        (alone if home is None else home).append([position] if home is None else position)

    assert settle(groups, points, nearest, 3, 5) == [*expected, *alone]
    assert settle([[0, 1], [2]], points, nearest, 3, 3) == [[0], [1], [2]]


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
