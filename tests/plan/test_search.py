from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import GIB, DeviceBudget, device_budget
from grpo_fast.plan.model_shape import Shapes, model_config, with_layers
from grpo_fast.plan.prediction import BUSY, Prediction
from grpo_fast.plan.room import Knob, cheapest_change, memory_options
from grpo_fast.plan.search import (
    AUTO_MOST,
    CONSTANTS,
    MOST_GENERATIONS,
    RECOMPUTED,
    Search,
    plan,
    with_values,
)
from grpo_fast.plan.sizes import step_sizes

ANY = {
    "model": {"path": "-", "dtype": "bfloat16", "attention": "flash_attention_2"},
    "dataset": {"source": "any.jsonl", "max_prompt_length": 64},
    "rewards": [{"reward": "length"}],
}
LEVEL = "rollout.vllm.sleep_level"


def run(num_generations: int | str = 8, **changes: Any) -> TrainConfig:
    rollout = {"num_generations": num_generations, "max_completion_length": 64}
    return TrainConfig.model_validate({**ANY, "rollout": rollout, **changes})


def gpu(total: int) -> DeviceBudget:
    return replace(device_budget("H200"), total=total)


def search(config: TrainConfig, shapes: Shapes, total: int = 2 << 30) -> Search:
    return Search(config, shapes, gpu(total))


def least(config: TrainConfig, shapes: Shapes, more: int = 0) -> int:
    """Bytes that the smallest step takes, and so many MiB more."""
    return search(config, shapes).least().total("update") + (more << 20)


@pytest.fixture(scope="module")
def shapes(config: Any) -> Shapes:
    return Shapes(config("llama", num_hidden_layers=2))


def test_a_group_is_bounded_by_what_is_usual_by_one_wave_and_by_the_memory(shapes: Shapes) -> None:
    def group(total: int, **changes: Any) -> int | None:
        return search(run("auto", **changes), shapes, total).generations()

    assert group(2 << 30) == AUTO_MOST
    assert group(2 << 30, prompts_per_step=30) == 1024 // 30
    assert group(2 << 30, prompts_per_step=200) == 8
    needed, packed = least(run(2), shapes), step_sizes(run(8)).packed_bytes
    scarce = needed + int(10.5 * 1.05 * packed / 8)  # ten more of each, with fragmentation
    assert group(scarce) == search(run(2), shapes, scarce).largest_generations() == 12
    assert group(needed - 1) is None
    assert plan(run(), shapes, gpu(2 << 30)).largest_generations == MOST_GENERATIONS
    too_large = plan(run(), shapes, gpu(1 << 20))
    assert too_large.choice.free < 0 and too_large.largest_generations is None


def test_the_choice_is_the_fastest_of_all_that_fit(shapes: Shapes) -> None:
    """Beside every other way with its own largest micro-batch, on budgets from plenty to next to nothing."""
    keys = ("model.gradient_checkpointing", "memory.offload", LEVEL)
    parts = ["gradients", "optimizer", "master"]
    ways = list(product(RECOMPUTED, (parts[:count] for count in range(4)), (0, 1)))
    scarce = least(run(), shapes, 20)
    for total in (scarce, 2 * scarce, 4 << 30):
        chosen = search(run(), shapes, total).fastest(8)
        others = [
            search(with_values(run(), dict(zip(keys, way, strict=True))), shapes, total).fastest(8)
            for way in ways
        ]

        seconds = [sum(one.seconds.values()) for one in others if one and is_let(one)]
        assert chosen.free >= 0
        assert sum(chosen.seconds.values()) == pytest.approx(min(seconds), rel=0.01)


def is_let(choice: Prediction) -> bool:
    """Level 0 only beside a micro-batch that fills the device, with all in flight."""
    return choice.values[LEVEL] == 1 or (
        choice.is_busy and choice.sizes.in_flight == choice.sizes.completions
    )


@pytest.mark.parametrize(("more", "share"), [(8, 0), (50, 0.03)], ids=["scarce", "a share is left"])
def test_no_more_in_flight_and_no_larger_micro_batch_would_fit(
    more: int, share: float, shapes: Shapes
) -> None:
    total = least(run(64), shapes, more)

    found = search(run(64), shapes, total).fastest(64)

    sizes, spare = found.sizes, int(share * total)
    assert found.free >= spare and sizes.in_flight < 1024 and found.values[LEVEL] == 1
    assert sizes.micro_batch_tokens == found.micro_batch.inputs  # none is fuller
    for larger in (
        {"most_in_flight": sizes.in_flight + 1},
        {"micro_batch_tokens": found.micro_batch.inputs + 64},
    ):
        assert found.predictor.predict(replace(sizes, **larger)).free < spare


def test_a_micro_batch_set_by_hand_is_planned_as_the_trainer_would_halve_it(shapes: Shapes) -> None:
    halved = search(run(micro_batch_tokens=50_000), shapes, least(run(), shapes, 50)).fastest(8)
    by_hand = search(run(micro_batch_tokens=300), shapes).fastest(8)
    rollout = {"rollout": {"engine": "transformers", "max_completion_length": 64}}  # which cannot sleep
    small = search(run(**rollout), shapes, least(run(**rollout), shapes, 8)).fastest(8)

    assert 128 <= halved.sizes.micro_batch_tokens < 50_000
    assert by_hand.sizes.micro_batch_tokens == 300
    assert by_hand.values[LEVEL] == 0  # small as it is, there is room
    assert 128 <= small.sizes.micro_batch_tokens < BUSY


def test_no_more_is_offloaded_than_the_host_holds(shapes: Shapes) -> None:
    predictor = search(run(), shapes).least().predictor
    state = predictor.on_host(["gradients", "optimizer"])
    scarce = gpu(least(run(), shapes, 8))

    def offloaded(host: int) -> list[str]:
        return Search(run(), shapes, replace(scarce, host=host)).least().values["memory.offload"]

    shape = predictor.shape
    assert state == 8 * shape.trained + 512 * shape.trainable_tensors
    assert offloaded(state) == ["gradients", "optimizer"]
    assert offloaded(state - 1) == ["gradients"]


def test_a_cpu_is_planned_with_its_constants(shapes: Shapes) -> None:
    model = ANY["model"] | {"attention": "sdpa"}
    found = plan(run("auto", model=model), shapes, DeviceBudget("cpu", name="cpu", total=8 << 30))

    assert found.choice.values == CONSTANTS | {"memory.offload": []}
    assert found.by_hand == []


def test_an_engine_must_hold_a_sequence_of_the_length_that_it_is_started_for() -> None:
    vllm = {"max_model_length": 4096, "max_sequences": 7}
    sizes = step_sizes(run(rollout={"vllm": vllm, "max_completion_length": 64, "num_generations": 8}))

    assert (sizes.longest, sizes.in_flight) == (4096, 7)


def test_what_is_set_by_hand_is_offered_where_it_saves_and_what_buys_most_comes_first(shapes: Shapes) -> None:
    def knobs(**changes: Any) -> dict[str, Knob]:
        found = memory_options(plan(run(**changes), shapes, gpu(2 << 30)))
        savings = [max(knob.saves.values()) for knob in found]
        assert savings == sorted(savings, reverse=True) and savings[-1] > 0
        return {knob.change: knob for knob in found}

    with_reference = knobs(loss={"beta": 0.1})
    assert {"model.lora={r: 16}", "loss.beta=0.0", "prompts_per_step=8"} <= set(with_reference)
    weights = plan(run(), shapes, gpu(2 << 30)).choice.parts["update"]["weights"]
    assert with_reference["loss.beta=0.0"].saves == {"update": weights, "rollout": weights}
    with_adapters = knobs(model=ANY["model"] | {"lora": {"r": 16}})
    offered = {change.partition("=")[0] for change in with_adapters}
    assert not offered & {"model.lora", "model.train_lm_head", "loss.beta"}
    assert "rollout.vllm.lora_sync" in offered  # merged weights are a second copy
    model = ANY["model"] | {"gradient_checkpointing": False}
    by_hand = knobs(model=model, memory={"offload": "none"}, micro_batch_tokens=4096)
    own = {"model.gradient_checkpointing=true", "micro_batch_tokens=2048"}
    own |= {"memory.offload=[gradients, optimizer, master]"}
    assert own <= set(by_hand) and not own & set(knobs())


def test_only_rollouts_of_known_length_that_the_model_can_have_are_planned(shapes: Shapes) -> None:
    config = run(dataset={"source": "any.jsonl"})
    without_rollouts = {key: ANY[key] for key in ("model", "dataset")} | {"algorithm": "dpo"}

    with pytest.raises(ValueError, match=r"dataset\.max_prompt_length"):
        plan(config, shapes, gpu(1 << 30))
    with pytest.raises(ValueError, match="algorithm"):
        plan(TrainConfig.model_validate(without_rollouts), shapes, gpu(1 << 30))
    replayed = run(rollout={"router_replay": True})
    with pytest.raises(ValueError, match=r"router_replay = true.* 'llama': it has no experts"):
        plan(replayed, shapes, gpu(1 << 30))


BY_HAND = {
    "model.gradient_checkpointing": False,
    "memory.offload": "none",
    "rollout.vllm.sleep_level": 0,
    "loss.beta": 0.1,
}


@pytest.fixture(scope="module")
def wide() -> Shapes:
    return Shapes(with_layers(model_config("Qwen3-8B"), 2))


def wide_search(shapes: Shapes, gib: float, **values: Any) -> Search:
    dataset, rollout = {"source": "-", "max_prompt_length": 512}, {"max_completion_length": 4096}
    config = run(8, model={"path": "-"}, dataset=dataset, rollout=rollout | {"num_generations": 8})
    return search(with_values(config, values), shapes, int(gib * GIB))


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
    wide: Shapes, gib: int, keys: list[str]
) -> None:
    def fits(values: dict[str, Any]) -> bool:
        return wide_search(wide, gib, **BY_HAND | values).least().free >= 0

    found = cheapest_change(wide_search(wide, gib, **BY_HAND))

    assert found is not None and [*found] == keys
    assert fits(found)
    assert not any(fits({key: value for key, value in found.items() if key != left}) for left in found)


def test_the_longest_completion_fits_and_one_token_more_does_not(wide: Shapes) -> None:
    found = wide_search(wide, 20).largest_context(8)

    def fits(tokens: int) -> bool:
        values = {"rollout.max_completion_length": tokens - 512, "model.gradient_checkpointing": True}
        return wide_search(wide, 20, **values).least().free >= 0

    assert found is not None and found.tokens > found.positions == 40_960
    assert fits(found.tokens) and not fits(found.tokens + 1)
    assert found.bound.endswith("in the update")
    assert wide_search(wide, 12).largest_context(8) is None
    assert cheapest_change(wide_search(wide, 1)) is None
    several = replace(wide_search(wide, 1), device=replace(gpu(GIB), ranks=4))
    assert cheapest_change(several) is None  # though no rank can have less than one prompt
