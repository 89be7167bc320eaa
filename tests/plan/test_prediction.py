from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrate, measure_update, peak_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS, architecture
from grpo_fast.plan.prediction import (
    Calibration,
    Prediction,
    Predictor,
    in_flight,
    paged_kv_bytes,
    transformers_kv_bytes,
)
from grpo_fast.plan.setup import Setup, StepSizes
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.decoder import ExpandedDecoder, SharedPrefixDecoder

UPDATE = StepSizes(prompts=4, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)
ROLLOUT = StepSizes(
    prompts=3, generations=4, prompt_length=18, completion_length=32, micro_batch_tokens=10**6
)
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora": LoraConfig(r=8)},
    "frozen head": {"train_lm_head": False},
}


def compare(setup: Setup, sizes: StepSizes, tolerance: float) -> None:
    predicted = Predictor(setup).predict(sizes)

    measured = measure_update(setup, sizes)

    assert predicted.allocated("update") == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_an_update_takes_what_was_predicted(way: str, dtype: str, config: Any, setup: Any) -> None:
    compare(setup(config("qwen2"), dtype=dtype, **WAYS[way]), UPDATE, 0.03)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "qwen3_moe"])
def test_so_it_does_for_other_architectures(family: str, config: Any, setup: Any) -> None:
    compare(setup(config(family), dtype="bfloat16"), UPDATE, 0.05)


@pytest.mark.parametrize("way", ["full", "checkpointed"])
def test_scores_that_a_cpu_keeps_are_counted(way: str, config: Any, setup: Any) -> None:
    sizes = replace(UPDATE, prompt_length=80, completion_length=60)

    compare(setup(config("gemma2"), **WAYS[way]), sizes, 0.08)


def test_so_it_does_in_several_micro_batches(config: Any, setup: Any) -> None:
    compare(setup(config("llama")), replace(UPDATE, micro_batch_tokens=400), 0.03)


def test_so_it_does_for_the_widths_of_a_real_model(setup: Any) -> None:
    shape = architecture("SmolLM2-135M")
    shape.num_hidden_layers = 2

    compare(setup(shape, dtype="bfloat16"), replace(UPDATE, prompts=2), 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_an_update_on_the_gpu_takes_what_was_predicted(way: str, setup: Any) -> None:
    sizes = StepSizes(8, 8, prompt_length=256, completion_length=512, micro_batch_tokens=16384)
    planned = setup(architecture("Qwen2.5-0.5B"), dtype="bfloat16", **WAYS[way])

    compare(replace(planned, device=device_budget(), attention="flex_attention"), sizes, 0.05)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prediction_that_holds_needs_no_calibration(family: str, config: Any, setup: Any) -> None:
    sizes = replace(UPDATE, prompts=2, prompt_length=60)

    found = calibrate(setup(config(family, num_hidden_layers=6, layer_types=None)), sizes)

    assert found.transient == pytest.approx(1, abs=0.05)
    assert found.context is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_gpu_that_is_not_there_cannot_be_measured(config: Any, setup: Any) -> None:
    with pytest.raises(ValueError, match="H200"):
        calibrate(replace(setup(config()), device=device_budget("H200")), UPDATE)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config())


@pytest.fixture
def on_gpu(traces: Traces, setup: Any) -> Any:
    """`on_gpu(sleeps=False)`: what an H200 takes of a bfloat16 model with vLLM, its setup changed."""

    def predict(calibration: Calibration | None = None, **changes: Any) -> Prediction:
        given = {"attention": "flash_attention_2", "engine": "vllm", "sleeps": True}
        planned = setup(traces.config, dtype="bfloat16")
        planned = replace(planned, **{"device": device_budget("H200")} | given | changes)
        return Predictor(planned, traces=traces, calibration=calibration).predict(UPDATE)

    return predict


def test_a_sleeping_engine_leaves_the_update_its_memory(on_gpu: Any) -> None:
    asleep, awake = on_gpu(), on_gpu(sleeps=False)

    assert "KV cache" not in asleep.parts["update"]
    assert awake.total("update") - asleep.total("update") == awake.parts["rollout"]["KV cache"]


def test_weights_of_its_own_cost_the_engine_a_model(on_gpu: Any) -> None:
    shared, own = on_gpu(), on_gpu(shares_weights=False)

    assert own.total("rollout") - shared.total("rollout") == shared.parts["update"]["weights"]


def test_a_reference_is_a_second_model(on_gpu: Any) -> None:
    without, with_it = on_gpu(), on_gpu(needs_reference=True)

    assert with_it.total("update") - without.total("update") == without.parts["update"]["weights"]


def test_parts_leave_in_order_until_the_engine_has_room(on_gpu: Any) -> None:
    roomy = on_gpu(offload="auto")
    parts = roomy.parts["rollout"]

    def with_bytes_missing(count: int) -> tuple[str, ...]:
        device = replace(roomy.device, total=roomy.total("rollout") - count)
        return on_gpu(offload="auto", device=device).offloaded

    assert roomy.offloaded == ()
    assert with_bytes_missing(1) == ("gradients",)
    assert with_bytes_missing(parts["gradients"] + 1) == ("gradients", "optimizer")
    assert with_bytes_missing(10**9) == ("gradients", "optimizer", "master")  # no reference: it is not there


def test_a_calibration_scales_what_comes_and_goes_alone(on_gpu: Any) -> None:
    plain, doubled = on_gpu().parts["update"], on_gpu(Calibration(transient=2.0)).parts["update"]

    assert [doubled[part] for part in ("weights", "optimizer")] == [plain["weights"], plain["optimizer"]]
    assert doubled["activations"] == 2 * plain["activations"]


def test_a_context_beside_the_allocator_belongs_to_gpus(on_gpu: Any, traces: Traces, setup: Any) -> None:
    gpu, cpu = on_gpu(), Predictor(setup(traces.config), traces=traces).predict(UPDATE)

    assert "CUDA context" in gpu.parts["update"]
    assert "CUDA context" not in cpu.parts["update"]
    assert gpu.total("update") > gpu.allocated("update") > 0
    assert on_gpu(Calibration(context=7)).parts["update"]["CUDA context"] == 7


def decode(model: torch.nn.Module, sizes: StepSizes) -> int:
    """Bytes of keys and values when every completion is as long as it may be."""
    kind = SharedPrefixDecoder if SharedPrefixDecoder.supports(model) else ExpandedDecoder
    decoder = kind(model, sizes.completion_length)
    model.set_attn_implementation(decoder.attention)
    prompts = [[1 + number] * sizes.prompt_length for number in range(sizes.prompts)]
    with torch.no_grad():
        decoder.prefill(prompts, torch.arange(sizes.prompts).repeat_interleave(sizes.generations))
        for _ in range(sizes.completion_length):
            decoder.step(torch.ones(sizes.completions, dtype=torch.int64))
    return decoder.memory()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "gemma3_text"])
def test_keys_and_values_are_what_the_engine_holds(family: str, dtype: str, config: Any, setup: Any) -> None:
    planned = setup(config(family), dtype=dtype)
    shape = Traces(planned.config).shape(planned.model)
    model = AutoModelForCausalLM.from_config(planned.config, dtype=planned.dtype).eval()

    held = decode(model, ROLLOUT)

    growing = transformers_kv_bytes(planned, shape, ROLLOUT, ROLLOUT.prompts, ROLLOUT.completions)
    assert held <= growing <= 1.25 * held  # of one layer, a copy while it grows; windows keep a token less


def test_decoding_takes_what_was_predicted(traces: Traces, setup: Any) -> None:
    planned = setup(traces.config)
    parts = Predictor(planned, traces=traces).predict(ROLLOUT).parts["rollout"]

    measured = peak_bytes(
        lambda: AutoModelForCausalLM.from_config(planned.config, dtype=planned.dtype).eval(),
        lambda model: decode(model, ROLLOUT),
        torch.device("cpu"),
    )

    assert measured <= 1.05 * sum(parts[name] for name in ("weights", "KV cache", "engine workspace"))


def test_a_cpu_decodes_in_batches(traces: Traces, setup: Any) -> None:
    planned = setup(traces.config)
    shape = traces.shape(planned.model)
    many = replace(ROLLOUT, prompts=64, completion_length=512)

    prompts, rows = in_flight(planned, shape, many)

    held = prompts * many.prompt_length + rows * many.completion_length
    assert held <= 2**14 < held + many.completion_length + many.prompt_length
    assert in_flight(replace(planned, max_batch_tokens=10**6), shape, many) == (64, 256)


def test_a_group_shares_the_full_pages_of_its_prompt(traces: Traces, setup: Any) -> None:
    shape = traces.shape(setup(traces.config).model)
    page = BLOCK_TOKENS * shape.paged_kv_bytes_per_token

    # A prompt of 18 tokens fills one page; 18 + 32 tokens take four, so each completion three of its own.
    assert paged_kv_bytes(shape, ROLLOUT) == (3 * (1 + 4 * 3) + 1) * page
