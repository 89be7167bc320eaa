from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrate, measure_update, peak_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS, model_config, with_layers
from grpo_fast.plan.prediction import Calibration, Prediction, Predictor
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.trace import Traces
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.decoder import ExpandedDecoder, SharedPrefixDecoder

UPDATE = StepSizes(prompts=3, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)
ROLLOUT = StepSizes(
    prompts=3, generations=4, prompt_length=18, completion_length=32, micro_batch_tokens=10**6
)
CHECKPOINTED, MLPS, LORA, FROZEN_HEAD = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "mlp"},
    {"lora": LoraConfig(r=8)},
    {"train_lm_head": False},
)


def compare(predictor: Predictor, sizes: StepSizes, tolerance: float) -> None:
    predicted = predictor.predict(sizes).allocated("update")

    measured = measure_update(predictor, sizes)

    assert predicted == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("family", "dtype", "way", "tolerance"),
    [
        ("qwen2", "float32", {}, 0.03),
        ("qwen2", "bfloat16", {}, 0.03),
        ("qwen2", "bfloat16", CHECKPOINTED, 0.03),
        ("qwen2", "bfloat16", MLPS | LORA, 0.03),
        ("qwen2", "bfloat16", LORA, 0.03),
        ("qwen2", "float32", FROZEN_HEAD, 0.03),
        ("gemma3_text", "bfloat16", {}, 0.05),
        ("gpt_neox", "bfloat16", {}, 0.05),
        ("qwen3_moe", "bfloat16", MLPS, 0.05),
    ],
    ids=str,
)
def test_an_update_takes_what_was_predicted(
    family: str, dtype: str, way: dict[str, Any], tolerance: float, config: Any, predictor: Any
) -> None:
    compare(predictor(config(family), dtype=dtype, **way), UPDATE, tolerance)


@pytest.mark.parametrize("way", [{}, CHECKPOINTED], ids=["full", "checkpointed"])
def test_scores_that_a_cpu_keeps_are_counted(way: dict[str, Any], config: Any, predictor: Any) -> None:
    sizes = replace(UPDATE, prompt_length=80, completion_length=60)

    compare(predictor(config("gemma2"), **way), sizes, 0.08)


def test_so_it_does_in_several_micro_batches(config: Any, predictor: Any) -> None:
    compare(predictor(config("llama")), replace(UPDATE, prompts=4, micro_batch_tokens=400), 0.03)


def test_a_shared_prompt_is_masked_and_copied_for_each_completion_after_the_first(
    config: Any, predictor: Any
) -> None:
    masks = predictor(config("llama")).predict(UPDATE).parts["update"]["masks"]

    # In three layers, of 9 completions: 31 inputs look at 40 + 31 tokens, of keys and values 2 heads of 32.
    assert masks == 3 * 9 * 4 * (31 * 71 + 71 * 2 * 2 * 32)


def test_so_it_does_for_the_widths_of_a_real_model(predictor: Any) -> None:
    model = with_layers(model_config("SmolLM2-135M"), 1)
    model.vocab_size = 8192

    compare(predictor(model, dtype="bfloat16"), replace(UPDATE, prompts=2), 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, CHECKPOINTED, MLPS, LORA, FROZEN_HEAD], ids=str)
def test_an_update_on_the_gpu_takes_what_was_predicted(way: dict[str, Any], predictor: Any) -> None:
    sizes = StepSizes(8, 8, prompt_length=256, completion_length=512, micro_batch_tokens=16384)
    model = model_config("Qwen2.5-0.5B")

    planned = predictor(model, device_budget(), dtype="bfloat16", attention="flex_attention", **way)

    compare(planned, sizes, 0.05)


def test_a_prediction_that_holds_needs_no_calibration(config: Any, predictor: Any) -> None:
    planned = predictor(config("gemma3_text", num_hidden_layers=6, layer_types=None))

    found = calibrate(planned.run, planned.traces.config, planned.device, replace(UPDATE, prompts=2))

    assert found.transient == pytest.approx(1, abs=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_gpu_that_is_not_there_cannot_be_measured(config: Any, predictor: Any) -> None:
    with pytest.raises(ValueError, match="H200"):
        calibrate(predictor(config()).run, config(), device_budget("H200"), UPDATE)


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config())


@pytest.fixture
def on_gpu(traces: Traces, predictor: Any) -> Any:
    """`on_gpu(memory={...})`: what an H200 takes of a bfloat16 model with vLLM, with other settings."""

    def predict(
        calibration: Calibration | None = None, total: int | None = None, **sections: Any
    ) -> Prediction:
        h200 = device_budget("H200")
        device = h200 if total is None else replace(h200, total=total)
        sections = {"memory": {"offload": "none"}} | sections
        settings = {"dtype": "bfloat16", "attention": "flash_attention_2"}
        return predictor(traces, device, calibration, sections, **settings).predict(UPDATE)

    return predict


def test_what_an_engine_and_a_reference_cost(on_gpu: Any, traces: Traces, predictor: Any) -> None:
    plain = on_gpu()
    weights, kv_cache = plain.parts["update"]["weights"], plain.parts["rollout"]["KV cache"]
    assert "KV cache" not in plain.parts["update"]

    awake = on_gpu(rollout={"vllm": {"sleep_level": 0}})
    assert awake.total("update") - plain.total("update") == kv_cache
    own = on_gpu(rollout={"vllm": {"share_weights": False}})
    assert own.total("rollout") - plain.total("rollout") == weights
    merged = predictor(traces, device_budget("H200"), dtype="bfloat16", **LORA).predict(UPDATE)
    assert merged.parts["rollout"]["engine weights"] == weights < merged.parts["update"]["weights"]
    with_reference = on_gpu(loss={"beta": 0.1})
    assert with_reference.total("update") - plain.total("update") == weights


def test_parts_leave_in_order_until_the_engine_has_room(on_gpu: Any) -> None:
    auto = {"memory": {"offload": "auto"}}
    roomy = on_gpu(**auto)

    def with_bytes_missing(count: int) -> tuple[str, ...]:
        return on_gpu(total=roomy.total("rollout") - count, **auto).offloaded

    assert roomy.offloaded == ()
    assert with_bytes_missing(1) == ("gradients",)
    assert with_bytes_missing(roomy.parts["rollout"]["gradients"] + 1) == ("gradients", "optimizer")
    assert with_bytes_missing(10**9) == ("gradients", "optimizer", "master")  # no reference: it is not there
    assert on_gpu(memory={"offload": ["master"]}).offloaded == ("master",)


def test_a_calibration_scales_what_comes_and_goes_alone(on_gpu: Any) -> None:
    plain = on_gpu()
    calibrated = on_gpu(Calibration(transient=2.0, context=7)).parts["update"]

    before = plain.parts["update"]
    assert [calibrated[part] for part in ("weights", "optimizer")] == [before["weights"], before["optimizer"]]
    assert calibrated["activations"] == 2 * before["activations"]
    assert calibrated["CUDA context"] == 7 < before["CUDA context"]
    assert plain.total("update") > plain.allocated("update") > 0


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


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("gpt_neox", "bfloat16"), ("gemma3_text", "bfloat16")],
)
def test_keys_and_values_are_what_the_engine_holds(
    family: str, dtype: str, config: Any, predictor: Any
) -> None:
    planned = predictor(config(family), dtype=dtype)
    model = AutoModelForCausalLM.from_config(planned.traces.config, dtype=planned.dtype).eval()

    held = decode(model, ROLLOUT)

    growing = planned.predict(ROLLOUT).parts["rollout"]["KV cache"]
    assert held <= growing <= 1.25 * held  # of one layer, a copy while it grows; windows keep a token less


def test_decoding_takes_what_was_predicted(traces: Traces, predictor: Any) -> None:
    planned = predictor(traces)
    parts = planned.predict(ROLLOUT).parts["rollout"]

    measured = peak_bytes(
        lambda: AutoModelForCausalLM.from_config(traces.config, dtype=planned.dtype).eval(),
        lambda model: decode(model, ROLLOUT),
        torch.device("cpu"),
    )

    assert measured <= 1.05 * sum(parts[name] for name in ("weights", "KV cache", "engine workspace"))


def test_a_cpu_decodes_in_batches(traces: Traces, predictor: Any) -> None:
    many = replace(ROLLOUT, prompts=64, completion_length=512)

    prompts, rows = predictor(traces).in_flight(many)

    held = prompts * many.prompt_length + rows * many.completion_length
    assert held <= 2**14 < held + many.completion_length + many.prompt_length
    large = {"rollout": {"max_batch_tokens": 10**6}}
    assert predictor(traces, sections=large).in_flight(many) == (64, 256)
    assert "CUDA context" not in predictor(traces).predict(UPDATE).parts["update"]


def test_a_group_shares_the_full_pages_of_its_prompt(traces: Traces, predictor: Any) -> None:
    planned = predictor(traces, device_budget("H200"), attention="sdpa")
    page = BLOCK_TOKENS * planned.shape.paged_kv_bytes_per_token

    # A prompt of 18 tokens fills one page; 18 + 32 tokens take four, so each completion three of its own.
    assert planned.predict(ROLLOUT).parts["rollout"]["KV cache"] == (3 * (1 + 4 * 3) + 1) * page
