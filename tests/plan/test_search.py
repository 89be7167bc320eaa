from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget, device_budget
from grpo_fast.plan.room import turned_knobs
from grpo_fast.plan.search import (
    AUTO_MOST,
    BUSY,
    CONSTANTS,
    MOST_GENERATIONS,
    RECOMPUTED,
    Choice,
    Search,
    plan,
    with_values,
)
from grpo_fast.plan.sizes import step_sizes
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


def test_a_group_is_bounded_by_what_is_usual_by_one_wave_and_by_the_memory(traces: Traces) -> None:
    def group(total: int, **changes: Any) -> int | None:
        return search(run("auto", **changes), traces, total).generations()

    assert group(2 << 30) == AUTO_MOST
    assert group(2 << 30, prompts_per_step=30) == 1024 // 30
    assert group(2 << 30, prompts_per_step=200) == 8
    sizes = step_sizes(run(8))
    least = search(run(2), traces).least().prediction.total("update")
    scarce = least + int(10.5 * 1.05 * sizes.packed_bytes / 8)  # ten more of each, with fragmentation
    assert group(scarce) == search(run(2), traces, scarce).largest_generations() == 12
    assert group(least - 1) is None
    assert plan(run(), traces, gpu(2 << 30)).largest_generations == MOST_GENERATIONS


def search(config: TrainConfig, traces: Traces, total: int = 2 << 30) -> Search:
    return Search(config, traces, gpu(total), step_sizes(config))


def test_what_does_not_fit_says_so(traces: Traces) -> None:
    found = plan(run(), traces, gpu(1 << 20))

    assert found.choice.prediction.free < 0
    assert found.largest_generations is None


def test_the_choice_is_the_fastest_of_all_that_fit(traces: Traces) -> None:
    """Beside every other way with its own largest micro-batch, on budgets from plenty to next to nothing."""
    keys = ("model.gradient_checkpointing", "memory.offload", "rollout.vllm.sleep_level")
    parts = ["gradients", "optimizer", "master"]
    ways = list(product(RECOMPUTED, (parts[:count] for count in range(4)), (0, 1)))
    least = search(run(), traces).least().prediction.total("update") + (20 << 20)
    for total in (least, 2 * least, 4 << 30):
        chosen = search(run(), traces, total).fastest(8)
        others = [
            search(with_values(run(), dict(zip(keys, way, strict=True))), traces, total).fastest(8)
            for way in ways
        ]

        seconds = [sum(one.prediction.seconds.values()) for one in others if one and is_let(one)]
        assert chosen.prediction.free >= 0
        assert sum(chosen.prediction.seconds.values()) == pytest.approx(min(seconds), rel=0.01)


def is_let(choice: Choice) -> bool:
    """Level 0 only beside a micro-batch that fills the device, with all in flight."""
    awake = choice.values["rollout.vllm.sleep_level"] == 0
    return not awake or (choice.is_busy and choice.sizes.in_flight == choice.sizes.completions)


def test_no_more_in_flight_and_no_larger_micro_batch_would_fit(traces: Traces) -> None:
    scarce = search(run(64), traces).least().prediction.total("update") + (8 << 20)

    found = search(run(64), traces, scarce).fastest(64)

    sizes, fits = found.sizes, found.predictor.fits
    assert fits(sizes) and sizes.in_flight < 1024 and found.values["rollout.vllm.sleep_level"] == 1
    assert sizes.micro_batch_tokens == found.prediction.micro_batch.inputs  # none is fuller
    assert not fits(replace(sizes, most_in_flight=sizes.in_flight + 1))
    assert not fits(replace(sizes, micro_batch_tokens=sizes.micro_batch_tokens + 64))


def test_a_choice_leaves_a_share_of_the_device_where_that_is_possible(traces: Traces) -> None:
    total = search(run(64), traces).least().prediction.total("update") + (50 << 20)

    found = search(run(64), traces, total).fastest(64)

    spare, sizes = int(0.03 * total), found.sizes
    assert found.prediction.free >= spare
    assert sizes.in_flight < 1024
    assert not found.predictor.fits(replace(sizes, most_in_flight=sizes.in_flight + 1), spare)


def test_what_never_sleeps_has_all_completions_in_flight_and_full_micro_batches(traces: Traces) -> None:
    totals = [total << 20 for total in range(1000, 1400, 50)]
    found = [search(run(64), traces, total).fastest(64) for total in totals]

    levels = [choice.values["rollout.vllm.sleep_level"] for choice in found]
    assert (levels[0], levels[-1]) == (1, 0)
    awake = [choice for choice in found if choice.values["rollout.vllm.sleep_level"] == 0]
    assert all(choice.is_busy and choice.sizes.in_flight == 1024 for choice in awake)


def test_a_micro_batch_set_by_hand_is_planned_as_the_trainer_would_halve_it(traces: Traces) -> None:
    least = search(run(), traces).least().prediction.total("update")

    found = search(run(micro_batch_tokens=50_000), traces, least + (50 << 20)).fastest(8)

    assert 128 <= found.sizes.micro_batch_tokens < 50_000
    by_hand = search(run(micro_batch_tokens=300), traces).fastest(8)
    assert by_hand.sizes.micro_batch_tokens == 300
    assert by_hand.values["rollout.vllm.sleep_level"] == 0  # small as it is, there is room


def test_no_more_is_offloaded_than_the_host_holds(traces: Traces) -> None:
    least = search(run(), traces).least()
    scarce = least.prediction.total("update") + (8 << 20)
    state = least.predictor.on_host(["gradients", "optimizer"])
    resident = least.predictor.shape.narrow + least.predictor.shape.wide

    def offloaded(host: int) -> list[str]:
        device = replace(gpu(scarce), host=host)
        return Search(run(), traces, device, step_sizes(run())).least().values["memory.offload"]

    assert state == 8 * resident + 512 * least.predictor.shape.trainable_tensors
    assert offloaded(state) == ["gradients", "optimizer"]
    assert offloaded(state - 1) == ["gradients"]


def test_a_cpu_is_planned_with_its_constants(traces: Traces) -> None:
    model = ANY["model"] | {"attention": "sdpa"}
    found = plan(run("auto", model=model), traces, DeviceBudget("cpu", "cpu", 8 << 30))

    assert found.choice.values == CONSTANTS | {"memory.offload": []}
    assert found.by_hand == []


def test_layers_without_mlps_are_recomputed_whole_or_not_at_all(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recomputed() -> set[object]:
        least = search(run(64), traces).least().prediction.total("update")
        totals = [least + (more << 20) for more in range(50, 130, 20)]
        found = [search(run(64), traces, total).fastest(64) for total in totals]
        return {choice.values["model.gradient_checkpointing"] for choice in found}

    assert "mlp" in recomputed()
    shape = replace(traces.shape(run().model), active_mlp=0)
    monkeypatch.setattr(Traces, "shape", lambda *_: shape)
    assert "mlp" not in recomputed()


def test_an_engine_must_hold_a_sequence_of_the_length_that_it_is_started_for() -> None:
    vllm = {"max_model_length": 4096, "max_sequences": 7}
    sizes = step_sizes(run(rollout={"vllm": vllm, "max_completion_length": 64, "num_generations": 8}))

    assert (sizes.longest, sizes.in_flight) == (4096, 7)


def test_small_micro_batches_do_beside_an_engine_that_cannot_sleep(traces: Traces) -> None:
    config = run(rollout={"engine": "transformers", "max_completion_length": 64})
    scarce = search(config, traces).least().prediction.total("update") + (8 << 20)

    assert 128 <= search(config, traces, scarce).fastest(8).sizes.micro_batch_tokens < BUSY


def test_every_knob_saves_something_and_what_buys_most_comes_first(traces: Traces) -> None:
    found = plan(run(loss={"beta": 0.1}), traces, gpu(2 << 30))

    knobs = turned_knobs(found.search, found.choice)
    changes = {knob.change: knob for knob in knobs}
    assert {"model.lora={r: 16}", "loss.beta=0.0", "prompts_per_step=8"} <= set(changes)
    assert all(max(knob.saves.values()) > 0 for knob in knobs)
    groups = [knob.largest_num_generations or 0 for knob in knobs]
    assert groups == sorted(groups, reverse=True)
    weights = found.choice.prediction.parts["update"]["weights"]
    assert changes["loss.beta=0.0"].saves == {"update": weights, "rollout": weights}


BY_HAND = {
    "model": ANY["model"] | {"gradient_checkpointing": False},
    "memory": {"offload": "none"},
    "micro_batch_tokens": 4096,
}


def test_what_the_plan_turns_by_itself_is_offered_only_where_it_is_set_by_hand(traces: Traces) -> None:
    def offered(config: TrainConfig) -> set[str]:
        found = plan(config, traces, gpu(2 << 30))
        return {knob.change.partition("=")[0] for knob in turned_knobs(found.search, found.choice)}

    adapters = ANY["model"] | {"lora": {"r": 16}}
    assert not offered(run(model=adapters)) & {"model.lora", "model.train_lm_head", "loss.beta"}
    assert "rollout.vllm.lora_sync" in offered(run(model=adapters))  # merged weights are a second copy
    own = {"model.gradient_checkpointing", "memory.offload", "micro_batch_tokens"}
    assert own <= offered(run(**BY_HAND)) and not own & offered(run())


def test_only_rollouts_of_known_length_can_be_planned(traces: Traces) -> None:
    config = run(dataset={"source": "any.jsonl"})
    without_rollouts = {key: ANY[key] for key in ("model", "dataset")} | {"algorithm": "dpo"}

    with pytest.raises(ValueError, match=r"dataset\.max_prompt_length"):
        plan(config, traces, gpu(1 << 30))
    with pytest.raises(ValueError, match="algorithm"):
        plan(TrainConfig.model_validate(without_rollouts), traces, gpu(1 << 30))
    found = plan(config, traces, gpu(2 << 30), prompt_length=64)
    assert found.choice.sizes.prompt_length == 64
