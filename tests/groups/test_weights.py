from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from grpo_fast.config.groups import AdaptiveWeightsConfig
from grpo_fast.groups.weights import AdaptiveWeights


def make(base=(1.0, 1.0), names="abc", **settings) -> AdaptiveWeights:
    return AdaptiveWeights(
        AdaptiveWeightsConfig(**{"method": "inverse_std", **settings}), names[: len(base)], base
    )


def test_at_first_the_weights_are_the_configured_ones_and_metrics_name_them():
    weights = make((0.5, -2.0))
    assert weights.weights == (0.5, -2.0)
    assert weights.metrics() == {"reward/a/weight": 0.5, "reward/b/weight": -2.0}


def test_inverse_std_gives_rewards_spread_in_proportion_to_weight(rng):
    weights = make((1.0, 2.0, -1.0), rate=1.0, min_factor=0.01, max_factor=100.0)
    scales = torch.tensor([1.0, 5.0, 0.2])
    table = torch.randn(4, 8, 3, generator=rng)
    table /= (table - table.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()

    weights.update(table * scales)

    spread = [w * s for w, s in zip(weights.weights, scales.tolist(), strict=True)]
    assert spread[1] == pytest.approx(2 * spread[0], rel=1e-4)
    assert spread[2] == pytest.approx(-spread[0], rel=1e-4)
    assert sum(map(abs, weights.weights)) == pytest.approx(4.0, rel=1e-4)


def test_factors_move_slowly_and_stay_within_their_bounds(rng):
    weights = make(rate=0.1, min_factor=0.5, max_factor=1.5)
    table = torch.randn(4, 8, 2, generator=rng) * torch.tensor([100.0, 0.01])
    seen = []
    for _ in range(100):
        weights.update(table)
        seen.append(weights.factors)
    for before, after in itertools.pairwise(seen):
        assert all(abs(a - b) <= 0.2 for a, b in zip(before, after, strict=True))
    assert seen[-1] == [0.5, 1.5]


def test_a_reward_without_spread_or_that_never_applies_keeps_its_factor(rng):
    weights = make((1.0, 1.0, 1.0), rate=1.0)
    table = torch.randn(3, 4, 3, generator=rng)
    table[..., 1] = 0.7
    table[..., 2] = float("nan")
    weights.update(table)
    assert weights.factors[1:] == [1.0, 1.0]
    assert weights.factors[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("base", "targets", "expected"),
    [
        ((1.0, 1.0, 1.0), {"a": 0.8, "b": 0.1}, [math.exp(0.5 * 0.4), math.exp(-0.5 * 0.3), 1.0]),
        ((-1.0, 1.0), {"a": 0.1, "b": 1e9}, [math.exp(0.5 * 0.3), 5.0]),  # a penalty; large units
    ],
)
def test_a_reward_below_its_target_gains_weight_and_a_penalty_above_it(base, targets, expected):
    weights = make(base, method="target", targets=targets, rate=0.5)
    weights.update(torch.full((2, 3, len(base)), 0.4))
    assert weights.factors == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{}, {"method": "target", "targets": {"a": 0.5}}])
def test_resumed_weights_go_on_exactly(rng, settings):
    tables = [torch.randn(3, 4, 2, generator=rng) for _ in range(6)]
    original = make(**settings)
    for table in tables[:3]:
        original.update(table)
    resumed = make(**settings)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for table in tables[3:]:
        original.update(table)
        resumed.update(table)
    assert resumed.weights == original.weights and resumed.state_dict() == original.state_dict()


def test_a_target_of_no_reward_and_the_state_of_other_rewards_are_refused():
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        make((1.0,), ["accuracy"], method="target", targets={"acuracy": 1.0})
    with pytest.raises(ValueError, match="of 2 rewards, this run has 1"):
        make((1.0,)).load_state_dict(make().state_dict())
