from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.model_shape import model_config
from grpo_fast.plan.seconds import rollout_seconds, update_seconds
from grpo_fast.plan.sizes import StepSizes, whole_step
from grpo_fast.plan.trace import Traces

STEP = StepSizes(
    prompts=16, generations=8, prompt_length=512, completion_length=512, micro_batch_tokens=16384
)


def test_a_step_of_llama_8b_on_an_h100_takes_what_arithmetic_by_hand_says(predictor: Any) -> None:
    traces = Traces(model_config("Llama-3.1-8B"))
    planned = predictor(traces, device_budget("H100"), dtype="bfloat16")
    shape, device = planned.shape, planned.device
    work = whole_step(STEP)

    update = update_seconds(planned.run, shape, device, work)
    rollout = rollout_seconds(shape, device, STEP, "vllm", 128)

    # 32 layers of 2·4096² + 2·4096·1024 + 3·4096·14336 weights; the head's are 128256·4096, 0.525e9.
    assert shape.active == pytest.approx(6.98e9, rel=1e-3)
    # 16 groups of 512 + 8 · 511 inputs. Layers: 2 · 6.98e9 · 73,600 = 1.0275e15 FLOPs; of 8 · 1023 · 1024 / 2
    # pairs in a group 7 · 512 · 513 / 2 are shared, attention 4 · 4096 · 32 · 52.33e6 = 0.0274e15; the head's
    # product: 2 · 0.525e9 · 65,536 = 0.069e15.
    # Forward and twice that backward, four products of the head, at 40 % of 989e12.
    assert update == pytest.approx((3 * 1.0549e15 + 4 * 0.0689e15) / (0.4 * 989e12), rel=1e-3)
    # 8,192 tokens of prompts: 0.115e15 FLOPs, 0.292 s. Then 512 times 15.0e9 bytes of weights and
    # 128 · 768 · 131,072 = 12.9e9 of keys and values, at 60 % of 3350e9: 13.9 ms.
    assert rollout == pytest.approx(0.292 + 512 * 27.9e9 / (0.6 * 3350e9), rel=1e-3)


def test_what_is_trained_and_asked_for_makes_a_step_longer(config: Any, predictor: Any) -> None:
    traces = Traces(config())

    def seconds(sections: dict[str, Any] | None = None, **keys: Any) -> float:
        made = predictor(traces, device_budget("H100"), None, sections, dtype="bfloat16", **keys)
        return update_seconds(made.run, made.shape, made.device, whole_step(STEP))

    assert seconds(gradient_checkpointing=True) > seconds() > seconds(train_lm_head=False)
    assert seconds(lora={"r": 1}) < seconds()
    assert seconds({"loss": {"beta": 0.1}}) > seconds()
    assert seconds({"num_iterations": 3}) == pytest.approx(3 * seconds())
    minibatches = {"minibatches": 2}
    assert seconds(minibatches) > seconds() == seconds({**minibatches, "old_logprobs": "sampler"})


def test_a_token_of_a_mixture_visits_the_experts_it_chooses(config: Any, predictor: Any) -> None:
    shape = predictor(Traces(config("qwen3_moe")), dtype="bfloat16").shape

    others = sum(shape.parameters[part] for part in ("attention", "mlp", "norms") if part in shape.parameters)
    assert shape.active == others + shape.parameters["experts"] // 2


def test_only_16_bits_on_a_gpu_with_published_speeds_have_an_estimate(config: Any, predictor: Any) -> None:
    traces = Traces(config())
    small = replace(STEP, prompts=2, prompt_length=16, completion_length=16)

    def seconds(gpu: str | None, dtype: str) -> Any:
        budget = {"device": device_budget(gpu)} if gpu else {}
        return predictor(traces, **budget, dtype=dtype, attention="sdpa").predict(small).seconds

    assert set(seconds("H100", "bfloat16")) == {"update", "rollout"}
    assert seconds("H100", "float32") is seconds("80GiB", "bfloat16") is seconds(None, "bfloat16") is None
