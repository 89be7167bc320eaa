"""Samplers: groups that come together, prompts by difficulty, and exact resuming."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.groups import CurriculumConfig, GroupConfig
from grpo_fast.data import LoadReport, PromptDataset, PromptSampler
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.sampler import GroupSampler, make_sampler

SIMILAR = GroupConfig(strategy="similarity", similarity_threshold=0.2, max_group_size=4)
NAMES = ["right", "short"]
NAN = float("nan")


@pytest.fixture
def grouped(make_prompts, seed):
    prompts = make_prompts(41)
    return lambda batch_size=8, config=SIMILAR: GroupSampler(prompts, batch_size, config, seed)


def draw(sampler: PromptSampler, batches: int) -> list[int]:
    return [prompt.index for _ in range(batches) for prompt in sampler.next()]


def test_an_epoch_has_every_prompt_once_and_groups_together(grouped):
    sampler = grouped(41)
    epochs = [draw(sampler, 1), draw(sampler, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(p.index for p in sampler.dataset)
    assert epochs[0] != epochs[1]
    for group in sampler.groups:
        places = sorted(epochs[1].index(sampler.dataset[position].index) for position in group)
        assert places == list(range(places[0], places[0] + len(group)))


def test_a_batch_shares_what_of_its_groups_it_holds(make_prompts, write_function):
    own = write_function("prompts", "[p.columns['topic'] for p in prompts]")
    config = GroupConfig(strategy=own, max_group_size=30)
    prompts = make_prompts(30, topics=2)
    sampler = GroupSampler(prompts, 4, config)
    first, second = ([p for p in prompts if p.columns["topic"] == topic] for topic in ("t0", "t1"))

    a, b, c, d = sampler.baseline_groups([first[0], second[0], first[1], first[2]])

    assert a == c == d != b
    for one, two, place in ((first, second, 0), (second, first, 1)):
        batch = two[:2]
        batch.insert(place, one[0])
        both = sampler.baseline_groups(batch)
        metrics = sampler.metrics(batch)
        alone = both.pop(place)  # no group's number, wherever it stands
        assert both[0] == both[1] != alone  # two suffice
        assert metrics == {"groups/sharing": 2 / 3, "groups/prompts_per_baseline": 3 / 2}


def test_the_spread_is_the_mean_distance_between_two_prompts(grouped):
    sampler, first = grouped(), torch.arange(3)
    apart = sampler.distance(first, first)
    assert sampler.spread([0, 1]) == pytest.approx(apart[0, 1].item())
    assert sampler.spread([0, 1, 2]) == pytest.approx((apart.triu(1).sum() / 3).item())
    assert sampler.spread([4]) is None


@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_resumed_sampler_keeps_its_groups_and_goes_on_exactly(grouped, before):
    original = grouped()
    draw(original, before)
    resumed = grouped(config=SIMILAR.model_copy(update={"similarity_threshold": 0.9}))

    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))

    assert draw(resumed, 9) == draw(original, 9)
    batch = original.next()
    assert resumed.baseline_groups(batch) == original.baseline_groups(batch)


def test_the_settings_choose_the_sampler_and_the_default_costs_nothing(make_prompts, seed):
    dataset = PromptDataset(tuple(make_prompts(9)), DatasetConfig(source="d"), LoadReport(9))

    def made(groups: GroupConfig, curriculum: CurriculumConfig | None = None) -> PromptSampler:
        return make_sampler(dataset, 4, groups, curriculum, ["r"], seed=seed)

    plain = made(GroupConfig())
    batch = plain.next()
    assert type(plain) is PromptSampler
    assert plain.baseline_groups(batch) is None and plain.metrics(batch) == {}
    assert type(made(SIMILAR)) is GroupSampler
    assert type(made(GroupConfig(), CurriculumConfig())) is DifficultySampler


def test_the_examples_of_the_configuration_are_no_part_of_a_conversation(seed, make_prompts):
    config = DatasetConfig(source="d", examples=[("e", "x")])
    shown = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "x"}]
    earlier = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    last = {"role": "user", "content": "go"}
    turns = [[*shown, *earlier, last], [*shown, *earlier, last], [*shown, last], [*shown, last]]
    prompts = tuple(replace(p, prompt=t) for p, t in zip(make_prompts(4), turns, strict=True))

    dataset = PromptDataset(prompts, config, LoadReport(4))
    sampler = make_sampler(dataset, 2, GroupConfig(strategy="prefix"), None, ["r"], seed=seed)

    assert sorted(sampler.groups) == [[0, 1], [2], [3]]


# ------------------------------------------------------------------------------------- by difficulty


@pytest.fixture
def make(make_prompts, seed):
    prompts = make_prompts(40)

    def make(batch_size: int = 8, pass_rates: list[float] | None = None, **settings) -> DifficultySampler:
        sampler = DifficultySampler(prompts, batch_size, CurriculumConfig(**settings), NAMES, seed)
        sampler.pass_rates = pass_rates or sampler.pass_rates
        return sampler

    return make


def answer(sampler: DifficultySampler, batch, rng: random.Random) -> None:
    """Rewards that come out as hard as each prompt's `level` says."""
    rewards = torch.tensor([[float(rng.random() < p.columns["level"]) for _ in range(4)] for p in batch])
    sampler.observe(batch, rewards, rewards[..., None].expand(-1, -1, 2))


def test_no_prompt_comes_twice_in_a_batch_and_none_is_lost(make, seed):
    sampler, rng = make(), random.Random(seed)
    first = draw(sampler, 5)  # nothing observed, all in one bucket: the least drawn come first
    assert sorted(first) == sorted(p.index for p in sampler.dataset)
    drawn = set()
    for _ in range(60):
        batch = sampler.next()
        assert len({p.index for p in batch}) == 8
        drawn.update(p.index for p in batch)
        answer(sampler, batch, rng)
    assert len(drawn) == 40


def rates_drawn(sampler: DifficultySampler, batches: int = 1) -> Counter[float]:
    batches_drawn = [sampler.next() for _ in range(batches)]
    return Counter(sampler.pass_rates[sampler.dataset.index(p)] for batch in batches_drawn for p in batch)


@pytest.mark.parametrize(
    ("batch_size", "weights", "pass_rates", "expected"),
    [
        (10, [1.0, 3.5, 0.5], [0.1] * 15 + [0.5] * 15 + [0.9] * 10, {0.1: 2, 0.5: 7, 0.9: 1}),
        (20, [1.0, 1.0, 98.0], [0.0] * 30 + [0.5] * 8 + [1.0] * 2, {1.0: 2, 0.5: 8, 0.0: 10}),
        (20, [1.0, 1.0, 2.0], [0.0] * 35 + [0.5] * 5, {0.0: 15, 0.5: 5}),  # an empty bucket
        (8, [1.0, 2.0, 1.0], [0.2] * 20 + [0.8] * 20, {0.2: 5, 0.8: 3}),  # on an edge: the easier side
    ],
    ids=["shares", "what one cannot give", "an empty bucket", "edges"],
)
def test_buckets_get_their_shares_and_give_what_they_lack_to_others(
    make, batch_size, weights, pass_rates, expected
):
    sampler = make(batch_size, pass_rates, bucket_weights=weights)
    tolerance = 1 if 0.2 in expected else 0  # thirds are drawn
    for _ in range(20):
        drawn = rates_drawn(sampler)
        assert all(abs(drawn[rate] - count) <= tolerance for rate, count in expected.items()), drawn


def test_a_small_share_comes_true_over_many_batches(make):
    sampler = make(4, [0.0] * 10 + [0.5] * 20 + [1.0] * 10, bucket_weights=[0.05, 1.0, 0.05])
    drawn = rates_drawn(sampler, 400)
    # Each batch takes none or one: a standard deviation of 0.0045 or so. Rounding would take none ever.
    assert drawn[0.0] / 1600 == pytest.approx(0.05 / 1.1, abs=0.03)
    assert drawn[1.0] / 1600 == pytest.approx(0.05 / 1.1, abs=0.03)


@pytest.mark.parametrize(("reward", "expected"), [(None, 0.75), ("right", 0.25), ("short", 1.0)])
def test_a_pass_rate_follows_the_deciding_reward(make, reward, expected):
    sampler = make(smoothing=1.0, threshold=0.7, reward=reward)
    table = torch.tensor([[[1.0, 0.7], [0.0, 0.9], [0.0, 1.0], [0.0, 1.0]]])
    sampler.observe([sampler.dataset[3]], torch.tensor([[0.9, 0.1, 0.7, 0.8]]), table)
    assert sampler.pass_rates[3] == pytest.approx(expected)


def test_a_pass_rate_is_smoothed_and_ignores_completions_without_a_reward(make):
    sampler = make(smoothing=0.25, initial_pass_rate=0.6)
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN], [NAN, NAN, NAN, NAN]])
    sampler.observe(sampler.dataset[:2], rewards, rewards[..., None])
    assert sampler.pass_rates[:2] == pytest.approx([0.6 + 0.25 * (0.5 - 0.6), 0.6])
    metrics = make(8, [0.0] * 10 + [0.2] * 10 + [1.0] * 20).metrics([])
    assert metrics["curriculum/pass_rate"] == pytest.approx(0.55)
    assert [metrics[f"curriculum/bucket_{i}"] for i in range(3)] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("before", [0, 6])
def test_resumed_pass_rates_and_draws_go_on_exactly(make, seed, before):
    original, resumed, rng = make(), make(), random.Random(seed)
    for _ in range(before):
        answer(original, original.next(), rng)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for step in range(6):
        batch = original.next()
        assert [p.index for p in resumed.next()] == [p.index for p in batch]
        for sampler in (original, resumed):
            answer(sampler, batch, random.Random(step))
        assert resumed.state_dict() == original.state_dict()


def test_known_pass_rates_come_from_a_column(make_prompts):
    rates = [0, 0.25, None, 0.5, 1]
    prompts = [replace(p, columns={"rate": rate}) for p, rate in zip(make_prompts(5), rates, strict=True)]
    config = CurriculumConfig(pass_rate_column="rate", initial_pass_rate=0.4)
    assert DifficultySampler(prompts, 2, config, NAMES, seed=0).pass_rates == [0, 0.25, 0.4, 0.5, 1]
    for wrong in (-0.1, 1.1, "half"):
        with pytest.raises(ValueError, match=f"{wrong!r} in row 1"):
            DifficultySampler([replace(prompts[0], columns={"rate": wrong})], 1, config, NAMES, seed=0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"reward": "shrot"}, "did you mean 'short'"), ({"pass_rate_column": "levle"}, "did you mean 'level'")],
)
def test_settings_that_do_not_fit_the_run_are_refused(make, settings, named):
    with pytest.raises(ValueError, match=named):
        make(**settings)
