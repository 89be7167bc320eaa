from __future__ import annotations

import json
import math

import pytest
import torch

from grpo_fast.config.groups import AdaptiveWeightsConfig
from grpo_fast.groups.weights import AdaptiveWeights


def make(base=(1.0, 1.0), names="abc", targets=None, **settings) -> AdaptiveWeights:
    config = AdaptiveWeightsConfig(targets=targets or {"a": 0.5}, **settings)
    return AdaptiveWeights(config, names[: len(base)], base)


@pytest.mark.parametrize(
    ("base", "targets", "expected"),
    [
        ((1.0, 1.0, 1.0), {"a": 0.8, "b": 0.1}, [math.exp(0.5 * 0.4), math.exp(-0.5 * 0.3), 1.0]),
        ((-1.0, 1.0), {"a": 0.1, "b": 1e9}, [math.exp(0.5 * 0.3), 5.0]),  # a penalty; large units
        ((1.0, 0.5), {"a": -1e9, "b": 0.4}, [0.2, 1.0]),
    ],
)
def test_a_reward_below_its_target_gains_weight_and_a_penalty_above_it(base, targets, expected):
    weights = make(base, targets=targets, rate=0.5)
    assert weights.weights == base
    weights.update(torch.full((2, 3, len(base)), 0.4))
    assert weights.factors == pytest.approx(expected)
    metrics = {f"reward/{name}/weight": w * f for name, w, f in zip("abc", base, expected, strict=False)}
    assert weights.metrics() == pytest.approx(metrics)


def test_a_running_mean_is_smoothed_and_ignores_missing_rewards():
    weights = make(smoothing=0.25)
    for first in (1.0, 0.0, math.nan):
        weights.update(torch.tensor([[[first, math.nan], [first, 2.0]]]))
    assert weights.means == [0.75, 2.0]


def test_resumed_weights_go_on_exactly(rng):
    tables = [torch.randn(3, 4, 2, generator=rng) for _ in range(6)]
    original, resumed = make(), make()
    for table in tables[:3]:
        original.update(table)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for table in tables[3:]:
        original.update(table)
        resumed.update(table)
    assert resumed.weights == original.weights and resumed.state_dict() == original.state_dict()


def test_a_target_of_no_reward_and_the_state_of_other_rewards_are_refused():
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        make((1.0,), ["accuracy"], {"acuracy": 1.0})
    with pytest.raises(ValueError, match="of 2 rewards, this run has 1"):
        make((1.0,)).load_state_dict(make().state_dict())
