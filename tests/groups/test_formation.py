from __future__ import annotations

import random

import pytest
import torch

from grpo_fast.data import Prompt
from grpo_fast.groups.config import CriterionConfig, GroupConfig
from grpo_fast.groups.formation import form_groups

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

    a, b, c, d = grouping.shared([first[0], second[0], first[1], first[2]])

    assert a == c == d != b
    alone = grouping.shared([first[0], second[0]])
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
        ("[1, 2]", "2 keys for 3 prompts; return a list with one key each"),
        ("{1, 2, 3}", "a set for 3 prompts"),
        ("[[], 1, 2]", "a list for prompt 0; a key is text or a number"),
    ],
)
def test_a_strategy_that_returns_no_key_for_each_prompt_is_refused(make_prompts, write_module, body, message):
    path = write_module("wrong", f"def wrong(prompts):\n    return {body}\n")
    with pytest.raises(ValueError, match=message):
        form_groups(make_prompts(3), GroupConfig(strategy=path))
