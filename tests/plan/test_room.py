from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import GIB, device_budget
from grpo_fast.plan.model_shape import model_config, with_layers
from grpo_fast.plan.room import cheapest_change
from grpo_fast.plan.search import Search, with_values
from grpo_fast.plan.sizes import step_sizes
from grpo_fast.plan.trace import Traces

BY_HAND = {
    "model.gradient_checkpointing": False,
    "memory.offload": "none",
    "rollout.vllm.sleep_level": 0,
    "loss.beta": 0.1,
}


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(with_layers(model_config("Qwen3-8B"), 2))


def search(traces: Traces, gib: float, **values: Any) -> Search:
    sections = {"dataset": {"source": "-", "max_prompt_length": 512}, "rewards": [{"reward": "length"}]}
    rollout = {"max_completion_length": 4096, "num_generations": 8}
    run = TrainConfig.model_validate({"model": {"path": "-"}, "rollout": rollout, **sections})
    run = with_values(run, values)
    device = replace(device_budget("H200"), total=int(gib * GIB))
    return Search(run, traces, device, step_sizes(run))


@pytest.mark.parametrize(
    ("gib", "keys"),
    [
        (40, []),
        (22, ["memory.offload"]),
        (19, ["memory.offload", "optimizer.kind"]),
        (9, ["model.lora"]),
        (7, ["model.lora", "rollout.vllm.lora_sync"]),
    ],
)
def test_the_cheapest_changes_that_fit_are_combined_and_none_of_them_is_needless(
    traces: Traces, gib: int, keys: list[str]
) -> None:
    def fits(values: dict[str, Any]) -> bool:
        return search(traces, gib, **BY_HAND | values).least().prediction.free >= 0

    found = cheapest_change(search(traces, gib, **BY_HAND))

    assert found is not None and [*found] == keys
    assert fits(found)
    assert not any(fits({key: value for key, value in found.items() if key != left}) for left in found)


def test_where_no_change_makes_room_there_is_no_cheapest(traces: Traces) -> None:
    assert cheapest_change(search(traces, 1)) is None


def test_the_longest_completion_fits_and_one_token_more_does_not(traces: Traces) -> None:
    found = search(traces, 20).largest_context(8)

    def fits(tokens: int) -> bool:
        values = {"rollout.max_completion_length": tokens - 512, "model.gradient_checkpointing": True}
        return search(traces, 20, **values).least().prediction.free >= 0

    assert found is not None and found.tokens > found.positions == 40_960
    assert fits(found.tokens) and not fits(found.tokens + 1)
    assert found.bound.endswith("in the update")
    assert search(traces, 12).largest_context(8) is None
