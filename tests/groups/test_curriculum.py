from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from grpo_fast.groups.config import CurriculumConfig
from grpo_fast.groups.curriculum import DifficultySampler

NAMES = ["right", "short"]
NAN = float("nan")


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
    drawn = Counter()
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
def test_buckets_get_their_shares_in_every_batch_and_give_what_they_lack_to_the_others(
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


def test_within_a_bucket_the_least_drawn_come_first(make):
    sampler = make()  # nothing observed: all in one bucket
    drawn = [p.index for _ in range(5) for p in sampler.next()]
    assert sorted(drawn) == sorted(p.index for p in sampler.dataset)


def test_the_shares_move_along_the_ramp(make):
    ramp = {"bucket_weights": [1.0, 1.0, 8.0], "final_bucket_weights": [8.0, 1.0, 1.0], "ramp_batches": 4}
    sampler = make(**ramp)
    seen = []
    for _ in range(6):
        seen.append(sampler.weights()[0])
        sampler.next()
    assert seen == pytest.approx([1.0, 2.75, 4.5, 6.25, 8.0, 8.0])


@pytest.mark.parametrize(("reward", "expected"), [(None, 0.75), ("right", 0.25), ("short", 1.0)])
def test_a_pass_rate_follows_the_deciding_reward(make, reward, expected):
    sampler = make(smoothing=1.0, threshold=0.7, reward=reward)
    prompt = sampler.dataset[3]
    table = torch.tensor([[[1.0, 0.7], [0.0, 0.9], [0.0, 1.0], [0.0, 1.0]]])
    sampler.observe([prompt], torch.tensor([[0.9, 0.1, 0.7, 0.8]]), table)
    assert sampler.pass_rates[3] == pytest.approx(expected)


def test_a_pass_rate_is_smoothed_and_ignores_completions_without_a_reward(make):
    sampler = make(smoothing=0.25, initial_pass_rate=0.6)
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN], [NAN, NAN, NAN, NAN]])
    sampler.observe(sampler.dataset[:2], rewards, rewards[..., None])
    assert sampler.pass_rates[:2] == pytest.approx([0.6 + 0.25 * (0.5 - 0.6), 0.6])


@pytest.mark.parametrize("before", [0, 1, 6])
def test_a_resumed_sampler_goes_on_exactly(make, seed, before):
    original, rng = make(), random.Random(seed)
    for _ in range(before):
        answer(original, original.next(), rng)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(6):
        batch = original.next()
        assert [p.index for p in resumed.next()] == [p.index for p in batch]
        state = rng.getstate()
        answer(original, batch, rng)
        rng.setstate(state)
        answer(resumed, batch, rng)
        assert resumed.state_dict() == original.state_dict()


def test_known_pass_rates_come_from_a_column(make_prompts):
    prompts = make_prompts(5)
    rates = [0, 0.25, None, 0.5, 1]
    prompts = [replace(p, columns={"rate": rate}) for p, rate in zip(prompts, rates, strict=True)]
    config = CurriculumConfig(pass_rate_column="rate", initial_pass_rate=0.4)
    assert DifficultySampler(prompts, 2, config, NAMES, seed=0).pass_rates == [0, 0.25, 0.4, 0.5, 1]
    for wrong in (-0.1, 1.1, "half"):
        with pytest.raises(ValueError, match=f"{wrong!r} in row 1"):
            DifficultySampler([replace(prompts[0], columns={"rate": wrong})], 1, config, NAMES, seed=0)


def test_metrics_show_where_the_dataset_stands(make):
    metrics = make(8, [0.0] * 10 + [0.2] * 10 + [1.0] * 20).metrics([])
    assert metrics["curriculum/pass_rate"] == pytest.approx(0.55)
    assert [metrics[f"curriculum/bucket_{i}"] for i in range(3)] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"reward": "shrot"}, "did you mean 'short'"), ({"pass_rate_column": "levle"}, "did you mean 'level'")],
)
def test_settings_that_do_not_fit_the_run_are_refused(make, settings, named):
    with pytest.raises(ValueError, match=named):
        make(**settings)
