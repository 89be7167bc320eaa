from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.search import MOST_GENERATIONS, Plan, plan
from grpo_fast.plan.trace import Traces

ANY = {
    "model": {"path": "-", "dtype": "bfloat16", "attention": "flash_attention_2"},
    "dataset": {"source": "any.jsonl", "max_prompt_length": 64},
    "rewards": [{"reward": "length"}],
}


def run(num_generations: int | str = 8, **changes: Any) -> TrainConfig:
    rollout = {"num_generations": num_generations, "max_completion_length": 64}
    return TrainConfig.model_validate({**ANY, "rollout": rollout, **changes})


def gpu(total: int) -> DeviceBudget:
    return replace(device_budget("H200"), total=total)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config("llama", num_hidden_layers=2))


def test_auto_plans_for_the_largest_group_and_one_more_would_not_fit(traces: Traces) -> None:
    def plan_for(num_generations: int | str) -> Plan:
        return plan(run(num_generations), traces, gpu(2 << 30), knobs=False)

    found = plan_for("auto")

    assert 2 < found.num_generations < MOST_GENERATIONS
    assert found.sizes.generations == found.num_generations == plan_for(8).num_generations
    assert found.prediction.free >= 0
    assert plan_for(found.num_generations + 1).prediction.free < 0


def test_what_does_not_fit_says_so(traces: Traces) -> None:
    found = plan(run(), traces, gpu(1 << 20), knobs=False)

    assert found.prediction.free < 0
    assert (found.num_generations, found.micro_batch_tokens, found.group_in_one_micro_batch) == (None,) * 3


def test_the_largest_micro_batch_and_the_room_for_keys_and_values_are_what_is_left(traces: Traces) -> None:
    found = plan(run(), traces, gpu(3 << 29), knobs=False)

    others = found.prediction.total("rollout") - found.kv_cache_bytes
    assert found.kv_cache_room == (3 << 29) - others
    at, above = (
        plan(run(micro_batch_tokens=tokens), traces, gpu(3 << 29), knobs=False).prediction
        for tokens in (found.micro_batch_tokens, 2 * found.micro_batch_tokens)
    )
    assert at.total("update") <= 3 << 29
    assert above.micro_batch.count == 1 or above.total("update") > 3 << 29


def test_every_knob_saves_something_and_what_buys_most_comes_first(traces: Traces) -> None:
    found = plan(run(loss={"beta": 0.1}), traces, gpu(2 << 30))

    changes = {knob.change.partition("=")[0]: knob for knob in found.knobs}
    assert {"model.gradient_checkpointing", "model.lora", "loss.beta", "prompts_per_step"} <= set(changes)
    assert all(max(knob.saves.values()) > 0 for knob in found.knobs)
    groups = [knob.largest_num_generations or 0 for knob in found.knobs]
    assert groups == sorted(groups, reverse=True)
    weights = found.prediction.parts["update"]["weights"]
    assert changes["loss.beta"].saves["update"] == weights == changes["loss.beta"].saves["rollout"]
    assert changes["model.lora"].change == "model.lora={r: 16}"


def test_knobs_that_are_turned_already_are_not_offered(traces: Traces) -> None:
    model = ANY["model"] | {"lora": {"r": 16}, "gradient_checkpointing": True}

    found = plan(run(model=model), traces, gpu(2 << 30))

    offered = {knob.change.partition("=")[0] for knob in found.knobs}
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
