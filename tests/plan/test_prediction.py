from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrate, measure_update, peak_bytes, random_batches, random_policy
from grpo_fast.plan.model_shape import BLOCK_TOKENS, model_config, with_layers
from grpo_fast.plan.prediction import Calibration, Prediction, Predictor
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.stand_ins import UNITS
from grpo_fast.plan.trace import Timeline, Traces
from grpo_fast.policy import PackedBatch, Policy
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.decoder import ExpandedDecoder, SharedPrefixDecoder
from grpo_fast.rollout.handover import MARGIN

UPDATE = StepSizes(prompts=3, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)
FEW = StepSizes(prompts=1, generations=2, prompt_length=8, completion_length=8, micro_batch_tokens=100)
ROLLOUT = StepSizes(
    prompts=3, generations=4, prompt_length=18, completion_length=32, micro_batch_tokens=10**6
)
CHECKPOINTED, OFFLOADED, MLPS, LORA, QLORA, FROZEN_HEAD = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "offload"},
    {"gradient_checkpointing": "mlp"},
    {"lora": LoraConfig(r=8)},
    {"lora": LoraConfig(r=8), "quantization": "nf4"},
    {"train_lm_head": False},
)


def compare(predictor: Predictor, sizes: StepSizes, tolerance: float) -> None:
    predicted = predictor.predict(sizes)

    measured = measure_update(predictor, sizes)

    on_host = 0 if predictor.on_gpu else predicted.host  # which is the same memory
    assert predicted.allocated("update") + on_host == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("family", "dtype", "way", "tolerance"),
    [
        ("qwen2", "float32", {}, 0.03),
        ("qwen2", "bfloat16", {}, 0.03),
        ("qwen2", "bfloat16", CHECKPOINTED, 0.03),
        ("qwen2", "bfloat16", OFFLOADED, 0.03),
        ("qwen2", "bfloat16", MLPS | LORA, 0.03),
        ("qwen2", "bfloat16", LORA, 0.03),
        ("qwen2", "float32", FROZEN_HEAD, 0.03),
        ("qwen2", "bfloat16", QLORA, 0.03),
        ("qwen2", "bfloat16", QLORA | CHECKPOINTED, 0.03),
        ("qwen2", "bfloat16", QLORA | MLPS, 0.03),
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


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", UPDATE), ("float32", FEW)], ids=["bf16", "fp32"])
def test_so_it_does_with_moments_of_8_bits(dtype: str, sizes: StepSizes, config: Any, predictor: Any) -> None:
    """Which a CPU steps as float32 ones, of one parameter after the other."""
    in_8_bits = predictor(config(), sections={"optimizer": {"kind": "adamw_8bit"}}, dtype=dtype)

    compare(in_8_bits, sizes, 0.03)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [("bfloat16", MLPS), ("float32", CHECKPOINTED), ("bfloat16", QLORA | OFFLOADED)],
    ids=["mlps in bfloat16", "layers in float32", "offloaded layers of QLoRA"],
)
def test_so_it_does_where_a_completion_is_longer_than_tiles_of_mlps(
    dtype: str, way: dict[str, Any], config: Any, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_fast.policy.recompute.TILE_TOKENS", 200)
    planned = predictor(config("llama", intermediate_size=1024), dtype=dtype, **way)
    sizes = StepSizes(1, 2, prompt_length=40, completion_length=600, micro_batch_tokens=100)

    compare(planned, sizes, 0.04)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_so_it_does_with_a_master_of_one_parameter_at_a_time(kind: str, config: Any, predictor: Any) -> None:
    rounds = {"kind": kind, "stochastic_rounding": True}
    rounded = predictor(config(), sections={"optimizer": rounds}, dtype="bfloat16")

    for sizes in (UPDATE, FEW):
        compare(rounded, sizes, 0.03)


def test_layers_inputs_wait_on_the_host_but_the_last(config: Any, predictor: Any) -> None:
    traces = Traces(config(num_hidden_layers=6))
    tokens = 3 * (40 + 4 * 31)

    def held(way: dict[str, Any]) -> tuple[int, float]:
        planned = predictor(traces, **way)
        timeline = traces.update(planned.run.model, "sdpa", first=False)
        return planned.predict(UPDATE).host, timeline.live({"tokens": tokens})[timeline.forward_end - 1]

    (nothing, kept), (host, left) = held(CHECKPOINTED), held(OFFLOADED)
    an_input = 4 * 128 * tokens
    assert (nothing, host, kept - left) == (0, 6 * an_input, 5 * an_input)


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


def test_a_forward_of_few_tokens_is_a_wide_weight_made_of_4_bits(config: Any, predictor: Any) -> None:
    planned = predictor(config(intermediate_size=2048), dtype="bfloat16", **QLORA)
    model, traces = planned.run.model, planned.traces

    def prepare() -> tuple[Policy, PackedBatch]:
        policy = random_policy(traces.config, model, attention="sdpa", device=torch.device("cpu"))
        return policy, random_batches(policy, FEW)[0]

    with torch.no_grad():
        measured = peak_bytes(prepare, lambda made: made[0].hidden_states(made[1]), torch.device("cpu"))

    transient = traces.forward(model).live({"tokens": 8 + 2 * 7, "targets": 2 * 8}).max()
    assert transient > 2 * 2048 * 128
    # On some CPUs oneDNN copies the operands of a product of 16 bits.
    assert planned.shape.bytes + transient == pytest.approx(measured, rel=0.08)
    compare(planned, FEW, 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, CHECKPOINTED, MLPS, LORA, FROZEN_HEAD], ids=str)
def test_an_update_on_the_gpu_takes_what_was_predicted(way: dict[str, Any], predictor: Any) -> None:
    sizes = StepSizes(8, 8, prompt_length=256, completion_length=512, micro_batch_tokens=16384)
    model = model_config("Qwen2.5-0.5B")

    planned = predictor(model, device_budget(), dtype="bfloat16", attention="flex_attention", **way)

    compare(planned, sizes, 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [8, 512], ids=["the step is highest", "the backward is"])
def test_state_on_the_host_visits_the_gpu_as_was_predicted(length: int, predictor: Any) -> None:
    sizes = StepSizes(8, 8, prompt_length=8, completion_length=length, micro_batch_tokens=16384)
    offload = {"memory": {"offload": ["optimizer", "master"]}}
    model, gpu = model_config("Qwen2.5-0.5B"), device_budget()

    planned = predictor(model, gpu, None, offload, dtype="bfloat16", attention="flex_attention")

    assert ("optimizer" in planned.update(sizes)) == (length == 8)
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


def test_what_is_offloaded_is_away_in_the_rollout_and_state_in_the_backward_too(
    on_gpu: Any, traces: Traces, predictor: Any
) -> None:
    plain = on_gpu().parts
    shape = {part: plain["update"][part] for part in ("weights", "master", "gradients", "optimizer")}
    assert all(size for size in shape.values())

    def update(*parts: str) -> dict[str, int]:
        return on_gpu(memory={"offload": [*parts]}).parts["update"]

    assert update("gradients") == plain["update"]  # they come back, and are written
    state = update("optimizer", "master")
    assert {"optimizer", "master"}.isdisjoint(state)
    assert on_gpu(optimizer={"kind": "adamw_offload"}).parts["update"] == state
    others = [part for part in plain["update"] if part not in ("optimizer", "master")]
    assert {part: state[part] for part in others} == {part: plain["update"][part] for part in others}
    away = on_gpu(memory={"offload": ["master", "gradients"]})
    assert away.offloaded == ("gradients", "master")
    assert {"gradients", "master"}.isdisjoint(away.parts["rollout"])
    assert away.parts["rollout"]["optimizer"] == plain["rollout"]["optimizer"]
    assert predictor(traces, sections={"memory": {"offload": ["optimizer"]}}).offloaded == ()  # on a CPU


def test_state_that_visits_the_device_takes_three_tensors_in_a_row(predictor: Any, config: Any) -> None:
    """Beside little to compute: one token a completion, and a head much larger than the layers."""
    traces = Traces(config("llama", vocab_size=2**15))
    sizes = StepSizes(1, 2, prompt_length=1, completion_length=2, micro_batch_tokens=1)
    offload = {"memory": {"offload": ["optimizer", "master"]}}
    planned = predictor(traces, device_budget("H200"), None, offload, dtype="bfloat16", attention="sdpa")

    parts = planned.update(sizes)

    # The embedding, then the first layer's q and k; the head comes last, after a norm of 128 numbers.
    numbers = max(2**15 * 128 + 128 * 128 + 64 * 128, 2**15 * 128 + 128 + 128)
    assert planned.shape.neighbours == numbers
    assert (parts["optimizer"], parts["master"]) == (8 * numbers, 4 * numbers)
    assert "activations" not in parts


def test_the_room_that_the_hand_over_keeps_free_is_planned_for_while_anything_can_leave(on_gpu: Any) -> None:
    everything = ["gradients", "optimizer", "master"]
    some, none, fixed, awake = (
        on_gpu(memory={"offload": parts}, rollout={"vllm": {"sleep_level": level}}).parts["rollout"]
        for parts, level in (([], 1), (everything, 1), ("none", 1), ([], 0))
    )

    assert some["left free"] == MARGIN - some["engine workspace"]
    assert all("left free" not in parts for parts in (none, fixed, awake))


QWEN_1B, QWEN_7B = 1_543_714_304, 7_615_616_512  # parameters of the published weights
# Of one layer, in adapters of rank 16: q and o, k and v, then gate, up and down.
ADAPTERS = 28 * 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
# 16 prompts of 32 full pages, each completion's 64 pages, and vLLM's null page, of 16 tokens. A token has
# keys and values of 28 layers with 2 (7B: 4) heads of 128 numbers in 16 bits.
PAGES_OF_1024, PAGES_OF_558 = 16 * 32 + 1024 * 64 + 1, 16 * 32 + 558 * 64 + 1
PAGE_1B = 16 * 2 * 28 * 2 * 128 * 2
HAND: dict[str, tuple[str, str, dict[str, Any], int, dict[str, int], dict[str, int]]] = {
    "1.5B on an A100-80": (
        *("Qwen2.5-1.5B", "A100-80", {}, 1024),
        {
            "weights": 2 * QWEN_1B,
            "master": 4 * QWEN_1B,
            "gradients": 4 * QWEN_1B,
            "optimizer": 8 * QWEN_1B + 338 * 512,  # and the count of steps of each of its tensors
        },
        {"KV cache": PAGES_OF_1024 * PAGE_1B},
    ),
    "1.5B with LoRA on an RTX 4090": (
        *("Qwen2.5-1.5B", "RTX-4090", {"lora": {"r": 16}}, 558),
        {
            "weights": 2 * (QWEN_1B + ADAPTERS),
            "master": 4 * ADAPTERS,
            "gradients": 4 * ADAPTERS,
            "optimizer": 8 * ADAPTERS + 28 * 7 * 2 * 512,
        },
        {"KV cache": PAGES_OF_558 * PAGE_1B, "engine weights": 2 * QWEN_1B},  # merged
    ),
    "7B on an A100-80 with its state on the host": (
        *("Qwen2.5-7B", "A100-80", {"offload": ["gradients", "optimizer", "master"]}, 1024),
        {"weights": 2 * QWEN_7B, "gradients": 4 * QWEN_7B, "master": 0, "optimizer": 0},
        {"weights": 2 * QWEN_7B, "gradients": 0, "KV cache": PAGES_OF_1024 * 2 * PAGE_1B},
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_weights_state_and_keys_and_values_are_what_arithmetic_by_hand_says(
    name: str, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gpu, settings, in_flight, update, rollout = HAND[name]
    activations = np.array([[8e9, *[0.0] * len(UNITS)]])  # which are compared elsewhere
    large = Timeline(activations, 1)
    monkeypatch.setattr(Traces, "update", lambda *_, **__: large)
    monkeypatch.setattr(Traces, "forward", lambda *_, **__: large)
    memory = {"memory": {"offload": settings.get("offload", [])}}
    traces, lora = Traces(model_config(path)), settings.get("lora")
    planned = predictor(traces, device_budget(gpu), None, memory, dtype="bfloat16", lora=lora)

    found = planned.predict(StepSizes(16, 64, 512, 1024, micro_batch_tokens=1536, most_in_flight=in_flight))

    assert {part: found.parts["update"].get(part, 0) for part in update} == update
    assert {part: found.parts["rollout"].get(part, 0) for part in rollout} == rollout


@pytest.mark.parametrize(
    ("family", "keys", "vllm", "shared", "sent"),
    [
        ("llama", {}, {}, True, False),
        ("qwen3_moe", {}, {}, False, True),  # experts are laid out in vLLM's own way
        ("llama", LORA, {}, False, True),  # merged
        ("llama", LORA, {"lora_sync": "adapter"}, True, False),
        ("llama", LORA, {"lora_sync": "adapter", "share_weights": False}, False, False),
        ("llama", QLORA, {}, True, False),
        ("llama", QLORA, {"tensor_parallel_size": 2}, False, False),
    ],
)
def test_weights_are_shared_or_sent_again_or_stay(
    family: str, keys: Any, vllm: Any, shared: bool, sent: bool, config: Any, predictor: Any
) -> None:
    sections = {"rollout": {"vllm": vllm}}
    planned = predictor(
        Traces(config(family)), device_budget("H200"), None, sections, dtype="bfloat16", **keys
    )

    assert (planned.shares_weights, planned.sends_weights) == (shared, sent)
    adapters = planned.shape.parameters.get("adapters", 0)
    own = 0 if shared else sum(planned.shape.parameters.values()) - adapters
    own += adapters * (keys == QLORA or "lora_sync" in vllm)
    assert planned.rollout(UPDATE).get("engine weights", 0) == 2 * own


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


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
def test_with_turns_a_long_history_beside_a_new_completion_fits(family: str, config: Any, predictor: Any):
    planned = predictor(config(family), sections={"rollout": {"tools": ["tools.py:add"]}})
    model = AutoModelForCausalLM.from_config(planned.traces.config, dtype=planned.dtype).eval()
    length, rows = ROLLOUT.completion_length, torch.arange(ROLLOUT.completions)
    decoder = (SharedPrefixDecoder if family == "qwen2" else ExpandedDecoder)(model, length)
    model.set_attn_implementation(decoder.attention)

    with torch.no_grad():
        begun = ROLLOUT.prompt_length
        decoder.prefill([[1 + row] * (begun + (length - 1) * (row % 2)) for row in rows.tolist()], rows)
        for _ in range(length):
            decoder.step(torch.ones(len(rows), dtype=torch.int64))

    predicted = planned.predict(ROLLOUT).parts["rollout"]["KV cache"]
    assert decoder.memory() <= predicted <= 1.25 * decoder.memory()


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


def test_keys_and_values_are_those_in_flight_and_of_the_longest_sequence(
    traces: Traces, predictor: Any
) -> None:
    planned = predictor(traces, device_budget("H200"), attention="sdpa")
    page = BLOCK_TOKENS * planned.shape.paged_kv_bytes_per_token

    def pages(**changes: int) -> float:
        return planned.rollout(replace(ROLLOUT, **changes))["KV cache"] / page

    # A prompt of 18 tokens fills one page; 18 + 32 tokens take four, so each completion three of its own.
    assert pages() == 3 * (1 + 4 * 3) + 1
    assert pages(most_in_flight=5) == 3 + 5 * 3 + 1
    assert pages(most_in_flight=2) == 2 + 2 * 3 + 1  # of two prompts at most
    assert pages(most_in_flight=1, longest=161) == 11 + 1
    sampler = [planned.rollout(replace(ROLLOUT, most_in_flight=n))["engine workspace"] for n in (12, 2)]
    assert sampler[0] - sampler[1] == 10 * 3 * 4 * planned.shape.vocabulary
