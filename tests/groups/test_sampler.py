"""Samplers: groups that come together, prompts by difficulty, and exact resuming."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.config.data import DatasetConfig
from grpo_fast.config.groups import CurriculumConfig, GroupConfig
from grpo_fast.data import LoadReport, PromptDataset, PromptSampler
from grpo_fast.data.table import CompletionTable
from grpo_fast.groups.curriculum import DifficultySampler
from grpo_fast.groups.formation import with_enough
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

    a, b, c, d = sampler.baseline_groups([first[0], second[0], first[1], first[2]], None)

    assert a == c == d != b
    for one, two, place in ((first, second, 0), (second, first, 1)):
        batch = two[:2]
        batch.insert(place, one[0])
        both = with_enough(sampler.baseline_groups(batch, None), 2)
        metrics = sampler.metrics(batch, both, None)
        alone = both.pop(place)  # no group's number, wherever it stands
        assert both[0] == both[1] != alone  # two suffice
        assert (metrics["groups/sharing"], metrics["groups/size_mean"]) == (2 / 3, 3 / 2)


def scored(prompts, rewards) -> CompletionTable:
    """Two completions of each prompt: the first of one token, the second of as many as it has level."""
    tokens = [t for p in prompts for t in ([1], [2] * round(1 + 8 * p.columns["level"]))]
    texts = [SimpleNamespace(text=" ".join(map(str, own))) for own in tokens]
    numbers = [number for number, _ in enumerate(prompts) for _ in range(2)]
    asked = [prompt.token_ids for prompt in prompts for _ in range(2)]
    facts = {"reward": torch.tensor(rewards).flatten()}
    return CompletionTable.of(asked, tokens, numbers, facts=facts, objects={"completion": texts})


MEANS = [0.9, 0.1, NAN, 0.5, 0.2, 0.8]


@pytest.fixture
def scored_batch(make_prompts):
    """Six prompts of two topics, whose completions have few or many distinct bigrams, with `MEANS`."""
    prompts = make_prompts(6)
    for place, prompt in enumerate(prompts):
        prompt.columns.update(topic=f"t{place // 3}", level=7 / 8 * (place // 3))
    return prompts, scored(prompts, [[mean, mean] for mean in MEANS])


@pytest.mark.parametrize(
    ("strategy", "settings", "expected"),
    [
        ("performance", {}, [[0, 5], [1], [2], [3, 4]]),
        ("performance", {"size_by": {"column": "topic", "t1": 3}}, [[0, 1], [2], [3, 4, 5]]),
        # Distances over the ranges: (3 |difference of means| / 0.8 + difference of diversity) / 4 <= 0.6.
        ("combined", {"max_group_size": 3}, [[0], [1], [2], [3, 4, 5]]),
        ("combined", {}, [[0, 5], [1], [2], [3, 4]]),
        ("own", {}, [[0, 5], [1, 4], [2], [3]]),
    ],
)
def test_groups_after_scoring(scored_batch, tmp_path, seed, strategy, settings, expected):
    (tmp_path / "own.py").write_text(
        "open(__file__ + '.imports', 'a').write('x')\n"
        "def own(rewards, completions, embeddings, step, total_steps):\n"
        "    assert embeddings.shape == (6, 1024) and len(completions) == 6\n"
        "    return [[step, 1], rewards.mean(1).nan_to_num(0).topk(total_steps).indices]\n"
    )
    if strategy == "combined":
        settings = {**settings, "criteria": [{"by": "reward", "weight": 3.0}, {"by": "diversity"}]}
    path = f"{tmp_path / 'own.py'}:own" if strategy == "own" else strategy
    prompts, table = scored_batch
    sampler = GroupSampler(
        prompts, 6, GroupConfig(**{"max_group_size": 2, "strategy": path, **settings}), seed
    )
    for _ in range(2):  # a function's file is imported once, not each step
        sampler.next()
        sampler.begin(4, 2)
        numbers = sampler.baseline_groups(prompts, table)
        assert sorted([i for i, own in enumerate(numbers) if own == key] for key in {*numbers}) == expected
    assert strategy != "own" or (tmp_path / "own.py.imports").read_text() == "x"


def test_random_groups_are_those_of_every_rank_and_differ_from_step_to_step(scored_batch, seed):
    prompts, table = scored_batch
    config = GroupConfig(strategy="random", max_group_size=2)
    samplers = [GroupSampler(prompts, 6, config, seed) for _ in range(2)]
    found = set()
    for _ in range(20):
        numbers, others = (s.next() and s.baseline_groups(prompts, table) for s in samplers)
        assert numbers == others
        assert sorted(Counter(numbers).values()) == [1, 1, 2, 2] and numbers.count(numbers[2]) == 1
        found.add(tuple(map(numbers.index, numbers)))
    assert len(found) > 1


def test_a_wrong_position_or_parameter_is_refused(make_prompts, write_function):
    prompts = make_prompts(4)
    table = scored(prompts, [[0.0, 1.0]] * 4)
    for body, named in [
        ("[[0, 1], [1, 2]]", "position 1 in group 0 and in group 1"),
        ("[[0, 4]]", "position 4 in group 0"),
        ("[1, 2]", "2 keys for 4 prompts"),
        ("{1, 2, 3, 4}", "a set for 4 prompts"),
        ("[[], 1, 2, 3]", "a list for prompt 0"),
    ]:
        sampler = GroupSampler(prompts, 4, GroupConfig(strategy=write_function("rewards", body)))
        with pytest.raises(ValueError, match=named):
            sampler.baseline_groups(sampler.next(), table)
    asks = GroupConfig(strategy=write_function("rewards, volume", "0"))
    with pytest.raises(ValueError, match="asks for 'volume'"):
        GroupSampler(prompts, 4, asks)


def test_metrics_describe_the_groups(make_prompts):
    prompts = make_prompts(5)
    sampler = GroupSampler(prompts, 5, GroupConfig(strategy="random"))
    for prompt, level in zip(prompts, [0.1, 0.2, 0.3, 0.4, 0.0], strict=True):
        prompt.columns["level"] = level
    table = scored(prompts, [[0.0, 1.0], [1.0, 3.0], [0.0, 0.0], [0.0, 0.0], [NAN, NAN]])
    metrics = sampler.metrics(prompts, [7, 7, 9, 9, 2], table)

    completions = table.token_ids.split(table.lengths.tolist())
    bigrams = [
        [
            pair
            for own in completions[2 * first : 2 * end]
            for pair in itertools.pairwise([*own.tolist(), "end"])
        ]
        for first, end in ((0, 2), (2, 4), (4, 5))
    ]
    vectors = sampler.embeddings(prompts)
    gaps = [(vectors[i] - vectors[k : k + 2].mean(0)).norm().item() for k in (0, 2) for i in (k, k + 1)]
    assert metrics == {
        **{"groups/number": 3, "groups/size_mean": pytest.approx(5 / 3), "groups/sharing": 0.8},
        "groups/diversity": pytest.approx(sum(len({*own}) / len(own) for own in bigrams) / 3),
        "groups/centroid_distance": pytest.approx(sum(gaps) / 4),
        "groups/reward_spread": pytest.approx((1.5 * 0.5**0.5 + 0.0) / 2),
    }


@pytest.mark.parametrize(
    ("size_by", "named"),
    [
        ({"column": "tpoic", "t0": 2}, "did you mean 'topic'"),
        ({"column": "topic", "t9": 2}, r"size_by\.t9: no row has this topic"),
        ({"column": "topic", "t0": 41}, r"t0 = 41 cannot be filled"),
    ],
)
def test_sizes_that_the_dataset_cannot_fill_are_refused(make_prompts, size_by, named):
    with pytest.raises(ValueError, match=named):
        GroupSampler(make_prompts(40), 40, GroupConfig(strategy="random", size_by=size_by))


PHASES = GroupConfig(
    strategy="adaptive",
    similarity_threshold=0.2,
    phases=[
        {"until": 0.3, "strategy": "random"},
        {"until": 0.7, "strategy": "similarity"},
        {"until": 1.0, "strategy": "performance"},
    ],
)


@pytest.mark.parametrize("resumed_at", [0, 2, 3, 4, 7, 9])
def test_phases_change_in_an_epoch_that_has_each_prompt_once(grouped, resumed_at):
    sampler, drawn, sharing = grouped(config=PHASES), [], []
    groups = {p: k for k, own in enumerate(grouped(config=SIMILAR).groups) for p in own}
    position = {prompt.index: place for place, prompt in enumerate(sampler.dataset)}
    for step in range(10):
        if step == resumed_at:
            state = json.loads(json.dumps(sampler.state_dict()))
            sampler = grouped(config=PHASES.model_copy(update={"similarity_threshold": 0.9}))
            sampler.load_state_dict(state)
        sampler.begin(step, 10)
        batch = sampler.next()
        assert sampler.phase == (0 if step < 3 else 1 if step < 7 else 2)
        drawn += [prompt.index for prompt in batch]
        keys = [groups[position[prompt.index]] for prompt in batch]
        sharing.append(sum(keys.count(key) > 1 for key in keys))
        if sampler.phase == 1:  # groups of the whole dataset that this batch holds
            numbers = sampler.baseline_groups(batch, None)
            assert [numbers.index(n) for n in numbers] == [keys.index(k) for k in keys]
    assert sorted(drawn[:41]) == sorted(position)
    uninterrupted = grouped(config=PHASES)
    again = []
    for step in range(10):
        uninterrupted.begin(step, 10)
        again += draw(uninterrupted, 1)
    assert drawn == again
    # Together, but for a group that ends with its batch or its epoch.
    runs = [groups[position[index]] for index in drawn[24:41]]
    assert len([*itertools.groupby(runs)]) == len({*runs})


@pytest.mark.parametrize("before", [0, 3, 7])
def test_a_resumed_sampler_keeps_its_groups_and_goes_on_exactly(grouped, before):
    original = grouped()
    draw(original, before)
    resumed = grouped(config=SIMILAR.model_copy(update={"similarity_threshold": 0.9}))

    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))

    assert draw(resumed, 9) == draw(original, 9)
    batch = original.next()
    assert resumed.baseline_groups(batch, None) == original.baseline_groups(batch, None)


def test_the_settings_choose_the_sampler_and_the_default_costs_nothing(make_prompts, seed):
    dataset = PromptDataset(tuple(make_prompts(9)), DatasetConfig(source="d"), LoadReport(9))

    def made(groups: GroupConfig, curriculum: CurriculumConfig | None = None) -> PromptSampler:
        return make_sampler(dataset, 4, groups, curriculum, ["r"], seed=seed)

    plain = made(GroupConfig())
    batch = plain.next()
    assert type(plain) is PromptSampler
    assert plain.baseline_groups(batch, None) is None and plain.metrics(batch, [], None) == {}
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


def test_buckets_are_sampled_by_weight_until_they_are_empty(make):
    # Weights 2, 7, 1 of 10; the easiest has two prompts, one of them on its edge.
    sampler = make(10, [0.1] * 19 + [0.5] * 19 + [0.8, 0.9], bucket_weights=[2.0, 7.0, 1.0])
    counts = Counter(sampler.pass_rates[sampler.dataset.index(p)] for _ in range(200) for p in sampler.next())
    hard, medium = counts[0.1] / 2000, counts[0.5] / 2000
    assert (hard, medium) == (pytest.approx(0.2, abs=0.05), pytest.approx(0.7, abs=0.05))
    assert counts[0.8] > 50 < counts[0.9]
    greedy = make(10, [0.1] * 32 + [0.5] * 6 + [0.9] * 2, bucket_weights=[1e-6, 1e-6, 1.0])
    first = Counter(greedy.pass_rates[greedy.dataset.index(p)] for p in greedy.next())
    assert first[0.9] == 2 and sum(first.values()) == 10  # the others give what it lacks


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
