from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import Shapes, model_config
from grpo_fast.plan.seconds import rollout_seconds, token_seconds, transfer_seconds, update_seconds
from grpo_fast.plan.sizes import MicroBatch, StepSizes, whole_step

STEP = StepSizes(
    prompts=16, generations=8, prompt_length=512, completion_length=512, micro_batch_tokens=16384
)


def test_a_step_of_llama_8b_on_an_h100_takes_what_arithmetic_by_hand_says(predictor: Any) -> None:
    shapes = Shapes(model_config("Llama-3.1-8B"))
    planned = predictor(shapes, device_budget("H100"), dtype="bfloat16")
    shape = planned.shape

    update = update_seconds(planned, whole_step(STEP))
    rollout = rollout_seconds(planned, STEP)

    # 32 layers of 2·4096² + 2·4096·1024 + 3·4096·14336 weights; the head's are 128256·4096, 0.525e9.
    assert shape.active == pytest.approx(6.98e9, rel=1e-3)
    # 16 groups of 512 + 8 · 511 inputs. Layers: 2 · 6.98e9 · 73,600 = 1.0275e15 FLOPs; of 8 · 1023 · 1024 / 2
    # pairs in a group 7 · 512 · 513 / 2 are shared, attention 4 · 4096 · 32 · 52.33e6 = 0.0274e15; the head's
    # product: 2 · 0.525e9 · 65,536 = 0.069e15.
    # Forward and twice that backward, four products of the head, at 40 % of 989e12. The gradient of
    # 8.03e9 parameters moves 2 + 2 bytes of 16 bits and 8 of its float32 sum.
    computed = (3 * 1.0549e15 + 4 * 0.0689e15) / (0.4 * 989e12)
    assert update == pytest.approx(computed + 12 * 8.03e9 / (0.6 * 3350e9), rel=1e-3)
    # 8,192 tokens of prompts: 0.115e15 FLOPs, 0.292 s. Then 512 times 15.0e9 bytes of weights and
    # 128 · 768 · 131,072 = 12.9e9 of keys and values, at 60 % of 3350e9: 13.9 ms.
    assert rollout == pytest.approx(0.292 + 512 * 27.9e9 / (0.6 * 3350e9), rel=1e-3)
    # A wave of 100 and one of the 28 left read the weights twice.
    waves = rollout_seconds(planned, replace(STEP, most_in_flight=100))
    assert waves == pytest.approx(0.292 + 512 * (27.9e9 + 15.0e9) / (0.6 * 3350e9), rel=1e-3)


def test_what_is_trained_and_asked_for_makes_a_step_longer(config: Any, predictor: Any) -> None:
    shapes = Shapes(config())

    def seconds(sections: dict[str, Any] | None = None, **keys: Any) -> float:
        made = predictor(shapes, device_budget("H100"), sections, dtype="bfloat16", **keys)
        return update_seconds(made, whole_step(STEP))

    mlps = seconds(gradient_checkpointing="mlp")
    assert seconds(gradient_checkpointing=True) > mlps > seconds() > seconds(train_lm_head=False)
    assert seconds(lora={"r": 1}) < seconds()
    assert seconds({"loss": {"beta": 0.1}}) > seconds()
    assert seconds({"num_iterations": 3}) == pytest.approx(3 * seconds())
    minibatches = {"minibatches": 2}
    assert seconds(minibatches) > seconds() == seconds({**minibatches, "old_logprobs": "sampler"})


def test_a_base_in_4_bits_is_read_as_it_is_for_few_rows_and_made_anew_for_many(
    config: Any, predictor: Any
) -> None:
    gpu = device_budget("H100")
    planned = predictor(Shapes(config()), gpu, dtype="bfloat16", attention="sdpa")
    planned.shape.active, planned.shape.layers = 10**10, []

    def moved(quantized: int, rows: int) -> float:
        planned.shape.quantized = quantized
        return token_seconds(planned, 1, rows) * 0.6 * gpu.bandwidth

    head = 2 * planned.shape.vocabulary * planned.shape.hidden
    assert moved(0, 8) == pytest.approx(2e10 + head)
    assert moved(8 * 10**9, 4) == pytest.approx(0.4e10 + 0.4e10 + head)
    assert moved(8 * 10**9, 8) == pytest.approx(0.4e10 + 0.4e10 + 2 * 1.6e10 + head)
    planned.weights = replace(planned.weights, shared=False)  # a copy of its own is not quantised
    assert moved(8 * 10**9, 8) == pytest.approx(2e10 + head)


def test_inputs_of_layers_leave_and_come_back_beside_the_computing(config: Any, predictor: Any) -> None:
    shapes = Shapes(config())

    def seconds(flops: float, recomputed: Any) -> float:
        gpu = replace(device_budget("H100"), flops=flops)
        made = predictor(shapes, gpu, dtype="bfloat16", gradient_checkpointing=recomputed)
        return update_seconds(made, replace(whole_step(STEP), count=0))

    assert seconds(1e12, "offload") == seconds(1e12, True)
    inputs = 16 * (512 + 8 * 511)
    assert seconds(1e30, "offload") == 2 * 3 * 128 * 2 * inputs / 50e9  # layers, width and bytes, both ways


def test_adapters_of_experts_cost_a_pass_over_all_experts_in_each_micro_batch(
    config: Any, predictor: Any
) -> None:
    shapes = Shapes(config("qwen3_moe", num_experts=64, moe_intermediate_size=512))

    def seconds(count: int, **keys: Any) -> float:
        made = predictor(shapes, device_budget("H100"), dtype="bfloat16", **keys)
        assert made.shape.plain.merged == (
            (3 * 64 * 512 * 128 * 2,) * 3 if "experts" in str(keys) else (0,) * 3
        )
        return update_seconds(made, replace(whole_step(STEP), count=count))

    def of_one(**keys: Any) -> float:
        return seconds(2, **keys) - seconds(1, **keys)

    lora = {
        "r": 1,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    attention = {"r": 1, "target_modules": ["q_proj"]}
    whole = 3 * 3 * 64 * 512 * 128 * 2  # bytes of all layers' experts, read once and written once at least
    assert of_one(lora=lora) - of_one(lora=attention) > 2 * whole / device_budget("H100").bandwidth


def test_only_16_bits_on_a_gpu_with_published_speeds_have_an_estimate(config: Any, predictor: Any) -> None:
    shapes = Shapes(config())

    def timed(gpu: str | None, dtype: str) -> bool:
        budget = {"device": device_budget(gpu)} if gpu else {}
        return predictor(shapes, **budget, dtype=dtype, attention="sdpa").timed

    assert timed("H100", "bfloat16")
    assert not (timed("H100", "float32") or timed("80GiB", "bfloat16") or timed(None, "bfloat16"))


def test_what_is_recomputed_launched_and_moved_takes_what_arithmetic_by_hand_says(
    config: Any, predictor: Any
) -> None:
    shapes, h100 = Shapes(config("llama")), device_budget("H100")
    step = whole_step(STEP)  # a thousand times, for the model is small
    many = replace(step, **{name: 1000 * getattr(step, name) for name in ("inputs", "pairs", "targets")})

    def made(sections: dict[str, Any] | None = None, **keys: Any) -> Any:
        return predictor(shapes, h100, sections, dtype="bfloat16", **keys)

    def update(found: Any, work: MicroBatch = many) -> float:
        return update_seconds(found, work)

    plain, mlps, layers = (made(gradient_checkpointing=how) for how in (False, "mlp", True))
    rate = 0.4 * 989e12
    # Gate, up and down of three layers; the whole layer has attention's products and pairs besides.
    assert update(mlps) - update(plain) == pytest.approx(2 * many.inputs * 3 * 3 * 128 * 256 / rate)
    attention = 2 * many.inputs * 3 * (2 * 128 * 128 + 2 * 128 * 64 + 2 * 128) + 4 * 128 * 3 * many.pairs
    assert update(layers) - update(mlps) == pytest.approx(attention / rate, rel=1e-2)
    # So many micro-batches that only launches count: three passes through three layers, 0.7 ms each.
    moved = 12 * plain.shape.trained / (0.6 * 3350e9)
    assert update(plain, replace(many, count=10**6)) == pytest.approx(10**6 * (9 * 7e-4 + moved))

    trained, weights = plain.shape.params_16bit, plain.shape.bytes
    steps = {"num_iterations": 2, "minibatches": 3, "prompts_per_step": 3}
    assert transfer_seconds(made({"memory": {"offload": ["gradients"]}})) == 0
    assert transfer_seconds(made({"memory": {"offload": ["optimizer"]}})) == 8 * trained / 50e9
    sections = steps | {"memory": {"offload": ["optimizer", "master", "reference"]}, "loss": {"beta": 0.1}}
    both = transfer_seconds(predictor(shapes, device_budget("L4"), sections, dtype="bfloat16"))
    assert both == pytest.approx((6 * 12 * trained + weights) / 25e9)


def test_minibatches_waves_and_sleep_take_their_time(config: Any, predictor: Any) -> None:
    shapes, h100 = Shapes(config("llama")), device_budget("H100")

    def seconds(sections: dict[str, Any], **sizes: int) -> dict[str, float]:
        planned = predictor(shapes, h100, sections, dtype="bfloat16", attention="flex_attention")
        return planned.predict(replace(STEP, **sizes)).seconds

    def rollout(level: int, in_flight: int) -> float:
        return seconds({"rollout": {"vllm": {"sleep_level": level}}}, most_in_flight=in_flight)["rollout"]

    one, two = (
        seconds({"minibatches": n, "old_logprobs": "sampler"}, minibatches=n, micro_batch_tokens=10**6)
        for n in (1, 2)
    )
    assert two["update"] == pytest.approx(2 * one["update"])  # launches and gradients count: a small model
    assert rollout(1, 128) - rollout(0, 128) == pytest.approx(0.2)
    # 2 ms a token: of 128 completions 50 at a time take three waves of 512 tokens.
    assert rollout(0, 50) - rollout(0, 128) == pytest.approx(2 * 512 * 2e-3)
