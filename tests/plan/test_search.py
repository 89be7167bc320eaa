from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.search import MOST_GENERATIONS, largest, plan
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig

ANY = {
    "model": {"path": "-", "dtype": "bfloat16", "attention": "flash_attention_2"},
    "dataset": {"source": "any.jsonl", "max_prompt_length": 64},
    "rewards": [{"reward": "length"}],
    "rollout": {"num_generations": 8, "max_completion_length": 64},
}


def run(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(ANY | changes)


def gpu(total: int) -> DeviceBudget:
    return replace(device_budget("H200"), total=total)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config("llama", num_hidden_layers=2))


@given(low=st.integers(1, 50), more=st.integers(0, 5000), last=st.integers(0, 6000))
def test_the_largest_is_the_last_that_fits(low: int, more: int, last: int) -> None:
    high = low + more

    found = largest(low, high, lambda size: size <= last)

    assert found == (None if last < low else min(last, high))


def test_one_more_completion_would_not_fit(traces: Traces) -> None:
    config, device = run(), gpu(2 << 30)

    found = plan(config, traces, device, knobs=False)

    def fits(count: int) -> bool:
        rollout = config.rollout.model_copy(update={"num_generations": count})
        changed = config.model_copy(update={"rollout": rollout})
        return plan(changed, traces, device, knobs=False).prediction.fits

    assert 2 < found.num_generations < MOST_GENERATIONS
    assert fits(found.num_generations)
    assert not fits(found.num_generations + 1)


def test_auto_plans_for_the_largest_group(traces: Traces) -> None:
    rollout = {"num_generations": "auto", "max_completion_length": 64}

    found = plan(run(rollout=rollout), traces, gpu(2 << 30), knobs=False)

    assert found.sizes.generations == found.num_generations
    assert found.prediction.fits


def test_what_does_not_fit_says_so(traces: Traces) -> None:
    found = plan(run(), traces, gpu(1 << 20), knobs=False)

    assert not found.prediction.fits
    assert found.prediction.free < 0
    assert (found.num_generations, found.micro_batch_tokens, found.group_in_one_micro_batch) == (None,) * 3


def test_the_room_for_keys_and_values_is_what_is_left(traces: Traces) -> None:
    device = gpu(3 << 30)

    found = plan(run(), traces, device, knobs=False)

    others = found.prediction.total("rollout") - found.kv_cache_bytes
    assert found.kv_cache_room == device.total - others


def test_every_knob_saves_something_and_what_buys_most_comes_first(traces: Traces) -> None:
    loss = {"beta": 0.1}

    found = plan(run(loss=loss), traces, gpu(2 << 30))

    changes = {effect.knob.key: effect for effect in found.knobs}
    assert {"model.gradient_checkpointing", "model.lora", "loss.beta", "prompts_per_step"} <= set(changes)
    assert all(max(effect.saves.values()) > 0 for effect in found.knobs)
    groups = [effect.num_generations or 0 for effect in found.knobs]
    assert groups == sorted(groups, reverse=True)
    weights = found.prediction.parts["update"]["weights"]
    assert changes["loss.beta"].saves["update"] == weights == changes["loss.beta"].saves["rollout"]


def test_knobs_that_are_turned_already_are_not_offered(traces: Traces) -> None:
    model = ANY["model"] | {"lora": LoraConfig().model_dump(), "gradient_checkpointing": True}

    found = plan(run(model=model), traces, gpu(2 << 30))

    offered = {effect.knob.key for effect in found.knobs}
    assert not offered & {"model.lora", "model.gradient_checkpointing", "model.train_lm_head", "loss.beta"}
    assert "rollout.vllm.lora_sync" in offered  # merged weights are a second copy


def test_only_rollouts_of_known_length_can_be_planned(traces: Traces) -> None:
    config = run(dataset={"source": "any.jsonl"})
    without_rollouts = {key: ANY[key] for key in ("model", "dataset")} | {"algorithm": "dpo"}

    with pytest.raises(ValueError, match=r"dataset\.max_prompt_length"):
        plan(config, traces, gpu(1 << 30))
    with pytest.raises(ValueError, match="algorithm"):
        plan(TrainConfig.model_validate(without_rollouts), traces, gpu(1 << 30))
    assert plan(config, traces, gpu(2 << 30), prompt_length=64, knobs=False).sizes.prompt_length == 64
