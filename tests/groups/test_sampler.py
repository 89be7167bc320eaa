from __future__ import annotations

import json
from dataclasses import replace

import pytest

from grpo_fast.data import LoadReport, PromptDataset, PromptSampler
from grpo_fast.data.config import DatasetConfig
from grpo_fast.groups.config import CurriculumConfig, GroupConfig
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import form_groups
from grpo_fast.groups.sampler import GroupSampler, make_sampler

SIMILAR = GroupConfig(strategy="similarity", similarity_threshold=0.2, max_group_size=4)


@pytest.fixture
def make_sampler_of(make_prompts, seed):
    prompts = make_prompts(41)

    def make(batch_size: int = 8, config: GroupConfig = SIMILAR) -> GroupSampler:
        return GroupSampler(prompts, batch_size, form_groups(prompts, config), seed)

    return make


def draw(sampler: PromptSampler, batches: int) -> list[int]:
    return [prompt.index for _ in range(batches) for prompt in sampler.next()]


def test_every_epoch_has_every_prompt_once_in_another_order(make_sampler_of):
    sampler = make_sampler_of()
    drawn = draw(sampler, 41)
    epochs = [drawn[i : i + 41] for i in range(0, 82, 41)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(p.index for p in sampler.dataset)
    assert epochs[0] != epochs[1]


def test_the_prompts_of_a_group_follow_each_other_so_that_batches_share_baselines(make_sampler_of):
    sampler = make_sampler_of(batch_size=41)
    order = draw(sampler, 1)
    for group in sampler.grouping.members:
        places = sorted(order.index(sampler.dataset[position].index) for position in group)
        assert places == list(range(places[0], places[0] + len(group)))


@pytest.mark.parametrize("before", [0, 1, 3, 7])
def test_a_resumed_sampler_goes_on_exactly_even_where_the_groups_would_form_otherwise(
    make_sampler_of, before
):
    original = make_sampler_of()
    draw(original, before)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = make_sampler_of(config=replace_threshold(0.9))

    resumed.load_state_dict(state)

    assert draw(resumed, 9) == draw(original, 9)
    batch = original.next()
    assert resumed.shared(batch) == original.shared(batch)


def replace_threshold(value: float) -> GroupConfig:
    return SIMILAR.model_copy(update={"similarity_threshold": value})


def test_metrics_count_who_shares_and_how_far_apart_they_are(make_sampler_of):
    sampler = make_sampler_of()
    batch = sampler.next()
    baselines = sampler.shared(batch)

    metrics = sampler.metrics(batch)

    sharing = [p for p, own in zip(batch, baselines, strict=True) if baselines.count(own) > 1]
    assert metrics["groups/sharing"] == len(sharing) / 8
    assert metrics["groups/prompts_per_baseline"] == 8 / len(set(baselines))
    spreads = []
    for own in set(baselines):
        places = [sampler.dataset.index(p) for p, b in zip(batch, baselines, strict=True) if b == own]
        spreads += [sampler.grouping.spread(places)] if len(places) > 1 else []
    assert metrics["groups/embedding_spread"] == pytest.approx(sum(spreads) / len(spreads))


def test_the_default_is_the_plain_sampler_which_costs_nothing(make_prompts, seed):
    dataset = PromptDataset(tuple(make_prompts(9)), DatasetConfig(source="d"), LoadReport(9))

    made = {
        "plain": make_sampler(dataset, 4, GroupConfig(), None, ["r"], seed=seed),
        "groups": make_sampler(dataset, 4, SIMILAR, None, ["r"], seed=seed),
    }
    made["curriculum"] = make_sampler(dataset, 4, GroupConfig(), CurriculumConfig(), ["r"], seed=seed)

    assert {name: type(sampler) for name, sampler in made.items()} == {
        "plain": PromptSampler,
        "groups": GroupSampler,
        "curriculum": DifficultySampler,
    }
    batch = made["plain"].next()
    assert made["plain"].shared(batch) is None and made["plain"].metrics(batch) == {}


def test_the_examples_of_the_configuration_are_no_part_of_a_conversation(seed, make_prompts):
    config = DatasetConfig(source="d", examples=[("e", "x")])
    shown = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "x"}]
    earlier = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    last = {"role": "user", "content": "go"}
    turns = [[*shown, *earlier, last], [*shown, *earlier, last], [*shown, last], [*shown, last]]
    prompts = tuple(replace(p, prompt=t) for p, t in zip(make_prompts(4), turns, strict=True))

    dataset = PromptDataset(prompts, config, LoadReport(4))
    sampler = make_sampler(dataset, 2, GroupConfig(strategy="prefix"), None, ["r"], seed=seed)

    assert sorted(sampler.grouping.members) == [(0, 1), (2,), (3,)]
