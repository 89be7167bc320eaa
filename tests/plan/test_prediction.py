from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import measure_update
from grpo_fast.plan.prediction import Calibration, Predictor
from grpo_fast.plan.setup import Setup, Workload
from grpo_fast.plan.shapes import architecture
from grpo_fast.plan.traces import Traces
from grpo_fast.policy.config import LoraConfig

WORK = Workload(prompts=4, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)
WAYS = {
    "full": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora": LoraConfig(r=8)},
    "frozen head": {"train_lm_head": False},
}


def compare(setup: Setup, work: Workload, tolerance: float) -> None:
    predicted = Predictor(setup).predict(work)

    measured = measure_update(
        setup.config, setup.model, work, attention=setup.attention, device=setup.device.kind
    )

    batch = predicted.micro_batch
    assert (batch.inputs, batch.targets, batch.count) == (
        measured.inputs,
        measured.targets,
        measured.micro_batches,
    )
    assert predicted.allocated("update") == pytest.approx(measured.peak, rel=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_an_update_takes_what_was_predicted(way: str, dtype: str, config: Any, setup: Any) -> None:
    compare(setup(config("qwen2"), dtype=dtype, **WAYS[way]), WORK, 0.03)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "qwen3_moe"])
def test_so_it_does_for_other_architectures(family: str, config: Any, setup: Any) -> None:
    compare(setup(config(family), dtype="bfloat16"), WORK, 0.05)


@pytest.mark.parametrize("way", ["full", "checkpointed"])
def test_scores_that_a_cpu_keeps_are_counted(way: str, config: Any, setup: Any) -> None:
    compare(setup(config("gemma2"), **WAYS[way]), replace(WORK, prompt_length=80, completion_length=60), 0.08)


def test_so_it_does_in_several_micro_batches(config: Any, setup: Any) -> None:
    compare(setup(config("llama")), replace(WORK, micro_batch_tokens=400), 0.03)


def test_so_it_does_for_the_widths_of_a_real_model(setup: Any) -> None:
    shape = architecture("SmolLM2-135M")
    shape.num_hidden_layers = 2

    compare(setup(shape, dtype="bfloat16"), replace(WORK, prompts=2), 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_an_update_on_the_gpu_takes_what_was_predicted(way: str, setup: Any) -> None:
    model = setup(architecture("Qwen2.5-0.5B"), dtype="bfloat16", **WAYS[way]).model
    work = Workload(8, 8, prompt_length=256, completion_length=512, micro_batch_tokens=16384)
    planned = setup(architecture("Qwen2.5-0.5B"))
    on_gpu = replace(planned, model=model, device=device_budget(), attention="flex_attention")

    compare(on_gpu, work, 0.05)


def on_gpu(setup: Setup, **changes: Any) -> Setup:
    given = {
        "device": device_budget("H200"),
        "attention": "flash_attention_2",
        "engine": "vllm",
        "sleeps": True,
    }
    return replace(setup, **given | changes)


def test_a_sleeping_engine_leaves_the_update_its_memory(config: Any, setup: Any) -> None:
    traces = Traces(config())
    planned = setup(traces.config, dtype="bfloat16")

    asleep, awake = (
        Predictor(on_gpu(planned, sleeps=sleeps), traces=traces).predict(WORK) for sleeps in (True, False)
    )

    assert "KV cache" not in asleep.parts["update"]
    assert awake.total("update") - asleep.total("update") == awake.parts["rollout"]["KV cache"]


def test_weights_of_its_own_cost_the_engine_a_model(config: Any, setup: Any) -> None:
    traces = Traces(config())
    planned = setup(traces.config, dtype="bfloat16")

    shared, own = (
        Predictor(on_gpu(planned, shares_weights=shared), traces=traces) for shared in (True, False)
    )

    difference = own.predict(WORK).total("rollout") - shared.predict(WORK).total("rollout")
    assert difference == own.shape.bytes


def test_parts_leave_in_order_until_the_engine_has_room(config: Any, setup: Any) -> None:
    traces = Traces(config())
    planned = on_gpu(setup(traces.config, dtype="bfloat16"), offload="auto")
    roomy = Predictor(planned, traces=traces).predict(WORK)
    parts = roomy.parts["rollout"]

    def with_bytes_missing(count: int) -> tuple[str, ...]:
        device = replace(planned.device, total=roomy.total("rollout") - count)
        return Predictor(replace(planned, device=device), traces=traces).predict(WORK).offloaded

    assert roomy.offloaded == ()
    assert with_bytes_missing(1) == ("gradients",)
    assert with_bytes_missing(parts["gradients"] + 1) == ("gradients", "optimizer")
    assert with_bytes_missing(10**9) == ("gradients", "optimizer", "master")  # no reference: it is not there


def test_a_reference_is_a_second_model(config: Any, setup: Any) -> None:
    traces = Traces(config())
    planned = setup(traces.config, dtype="bfloat16")

    without, with_it = (
        Predictor(replace(planned, needs_reference=needs), traces=traces) for needs in (False, True)
    )

    difference = with_it.predict(WORK).total("update") - without.predict(WORK).total("update")
    assert difference == with_it.shape.bytes


def test_a_calibration_scales_what_comes_and_goes_alone(config: Any, setup: Any) -> None:
    traces = Traces(config())
    plain, doubled = (
        Predictor(setup(traces.config), traces=traces, calibration=Calibration(passing=factor)).predict(WORK)
        for factor in (1.0, 2.0)
    )

    for part in ("weights", "optimizer"):
        assert doubled.parts["update"][part] == plain.parts["update"][part]
    assert doubled.parts["update"]["activations"] == 2 * plain.parts["update"]["activations"]


def test_a_context_beside_the_allocator_belongs_to_gpus(config: Any, setup: Any) -> None:
    planned = setup(config())
    gpu = Predictor(on_gpu(planned)).predict(WORK)
    cpu = Predictor(planned).predict(WORK)

    assert "CUDA context" in gpu.parts["update"]
    assert "CUDA context" not in cpu.parts["update"]
    assert gpu.total("update") > gpu.allocated("update") > 0
