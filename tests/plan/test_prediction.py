from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrated, measured_update, peak_bytes
from grpo_fast.plan.model_shape import BLOCK_TOKENS, model_config, with_layers
from grpo_fast.plan.prediction import Prediction, Predictor
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.stand_ins import UNITS
from grpo_fast.plan.trace import Timeline, Traces
from grpo_fast.policy.config import LoraConfig
from grpo_fast.rollout.decoder import ExpandedDecoder, SharedPrefixDecoder
from grpo_fast.rollout.handover import MARGIN

UPDATE = StepSizes(prompts=3, generations=4, prompt_length=40, completion_length=32, micro_batch_tokens=10**6)
ROLLOUT = replace(UPDATE, prompt_length=18)
FEW = StepSizes(prompts=1, generations=2, prompt_length=8, completion_length=8, micro_batch_tokens=100)
SEVERAL = replace(UPDATE, prompts=4, micro_batch_tokens=400)
SCORES = replace(UPDATE, prompt_length=80, completion_length=60)
LONG = StepSizes(1, 2, prompt_length=40, completion_length=600, micro_batch_tokens=100)
CHECKPOINTED, OFFLOADED, MLPS, LORA, QLORA, FROZEN_HEAD = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": "offload"},
    {"gradient_checkpointing": "mlp"},
    {"lora": LoraConfig(r=8)},
    {"lora": LoraConfig(r=8), "quantization": "nf4"},
    {"train_lm_head": False},
)
IN_8_BITS, ROUNDED = {"kind": "adamw_8bit"}, {"stochastic_rounding": True}


def compare(predictor: Predictor, sizes: StepSizes, tolerance: float) -> None:
    predicted, measured = predictor.predict(sizes), measured_update(predictor, sizes)

    on_host = 0 if predictor.on_gpu else predicted.host  # which is the same memory
    assert predicted.allocated("update") + on_host == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("family", "dtype", "way", "optimizer", "sizes", "tolerance"),
    [
        ("qwen2", "bfloat16", {}, {}, UPDATE, 0.03),
        ("qwen2", "bfloat16", OFFLOADED, {}, UPDATE, 0.03),
        ("qwen2", "float32", FROZEN_HEAD, {}, UPDATE, 0.03),
        ("qwen2", "bfloat16", MLPS | LORA, {}, UPDATE, 0.03),
        ("qwen2", "bfloat16", QLORA, {}, UPDATE, 0.03),
        ("qwen2", "bfloat16", QLORA | MLPS, {}, UPDATE, 0.03),
        ("qwen2", "bfloat16", QLORA, {}, FEW, 0.05),
        ("gemma3_text", "bfloat16", {}, {}, UPDATE, 0.05),
        ("gpt_neox", "bfloat16", CHECKPOINTED, {}, UPDATE, 0.05),
        ("qwen3_moe", "bfloat16", MLPS, {}, UPDATE, 0.05),
        ("gemma2", "float32", {}, {}, SCORES, 0.08),  # which a CPU keeps
        ("llama", "float32", {}, {}, SEVERAL, 0.03),
        ("llama", "bfloat16", MLPS, {}, LONG, 0.04),  # in tiles
        ("llama", "float32", CHECKPOINTED, {}, LONG, 0.04),
        ("llama", "bfloat16", QLORA | OFFLOADED, {}, LONG, 0.04),
        ("qwen2", "bfloat16", {}, IN_8_BITS, UPDATE, 0.03),  # which a CPU steps as float32, one by one
        ("qwen2", "float32", {}, IN_8_BITS, FEW, 0.03),
        ("qwen2", "bfloat16", {}, ROUNDED, FEW, 0.03),
        ("qwen2", "bfloat16", {}, ROUNDED | IN_8_BITS, UPDATE, 0.03),
    ],
)
@pytest.mark.drawn(8)
def test_an_update_takes_what_was_predicted(
    family: str,
    dtype: str,
    way: dict[str, Any],
    optimizer: dict[str, Any],
    sizes: StepSizes,
    tolerance: float,
    config: Any,
    predictor: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_fast.policy.layers.TILE_TOKENS", 200 if sizes is LONG else 8192)
    wide = {LONG: 1024, FEW: 2048}.get(sizes, 256)
    small = config(family, intermediate_size=wide)

    compare(predictor(small, sections={"optimizer": optimizer}, dtype=dtype, **way), sizes, tolerance)


def test_a_shared_prompt_is_masked_and_copied_for_each_completion_after_the_first(
    config: Any, predictor: Any
) -> None:
    masks = predictor(config("llama")).predict(UPDATE).parts["update"]["masks"]

    # In three layers, of 9 completions: 31 inputs look at 40 + 31 tokens, of keys and values 2 heads of 32.
    assert masks == 3 * 9 * 4 * (31 * 71 + 71 * 2 * 2 * 32)


ON_GPU = StepSizes(8, 8, prompt_length=256, completion_length=512, micro_batch_tokens=16384)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "offload", "sizes"),
    [
        *((way, "none", ON_GPU) for way in ({}, CHECKPOINTED, MLPS, LORA, FROZEN_HEAD)),
        # State visits the GPU in the optimiser's step: of few tokens the highest, else the backward is.
        *(
            ({}, ["optimizer", "master"], replace(ON_GPU, prompt_length=8, completion_length=n))
            for n in (8, 512)
        ),
    ],
    ids=str,
)
def test_an_update_on_the_gpu_takes_what_was_predicted(
    way: dict[str, Any], offload: Any, sizes: StepSizes, predictor: Any
) -> None:
    sections = {"memory": {"offload": offload}}
    settings = {"dtype": "bfloat16", "attention": "flex_attention"} | way

    compare(predictor(model_config("Qwen2.5-0.5B"), device_budget(), sections, **settings), sizes, 0.05)


def test_a_calibration_finds_a_prediction_that_holds_and_corrects_one_that_does_not(
    config: Any, predictor: Any
) -> None:
    planned = predictor(config("gemma3_text", num_hidden_layers=6, layer_types=None))
    given = planned.run, planned.traces
    found = calibrated(*given, planned.device, UPDATE).transient
    doubled = calibrated(*given, replace(planned.device, transient=2.0), UPDATE).transient

    assert found == pytest.approx(1, abs=0.05)
    assert doubled == pytest.approx(found, abs=0.05)


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)


@pytest.fixture(scope="module")
def traces(config: Any) -> Traces:
    return Traces(config())


@pytest.fixture
def on_gpu(traces: Traces, predictor: Any) -> Any:
    """`on_gpu(memory={...})`: what an H200 takes of a bfloat16 model with vLLM, with other settings."""

    def predict(**sections: Any) -> Prediction:
        sections = {"memory": {"offload": "none"}} | sections
        settings = {"dtype": "bfloat16", "attention": "flash_attention_2"}
        return predictor(traces, device_budget("H200"), sections, **settings).predict(UPDATE)

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
    assert away.predictor.offloaded == ("gradients", "master")
    assert {"gradients", "master"}.isdisjoint(away.parts["rollout"])
    assert away.parts["rollout"]["optimizer"] == plain["rollout"]["optimizer"]
    assert predictor(traces, sections={"memory": {"offload": ["optimizer"]}}).offloaded == ()  # on a CPU


def test_state_that_visits_the_device_takes_three_tensors_in_a_row(predictor: Any, config: Any) -> None:
    """Beside little to compute: one token a completion, and a head much larger than the layers."""
    traces = Traces(config("llama", vocab_size=2**15))
    sizes = StepSizes(1, 2, prompt_length=1, completion_length=2, micro_batch_tokens=1)
    offload = {"memory": {"offload": ["optimizer", "master"]}}
    planned = predictor(traces, device_budget("H200"), offload, dtype="bfloat16", attention="sdpa")

    parts = planned.predict(sizes).parts["update"]

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
    planned = predictor(traces, device_budget(gpu), memory, dtype="bfloat16", lora=lora)

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
    planned = predictor(Traces(config(family)), device_budget("H200"), sections, dtype="bfloat16", **keys)

    assert (planned.shares_weights, planned.sends_weights) == (shared, sent)
    adapters = planned.shape.parameters.get("adapters", 0)
    own = 0 if shared else sum(planned.shape.parameters.values()) - adapters
    own += adapters * (keys == QLORA or "lora_sync" in vllm)
    assert planned.predict(UPDATE).parts["rollout"].get("engine weights", 0) == 2 * own


def decode(model: torch.nn.Module, *, turns: bool = False) -> int:
    """Bytes of keys and values when every completion of `ROLLOUT` is as long as it may be.

    With turns, each has a prompt of its own, and every other one comes back at its longest.
    """
    kind = SharedPrefixDecoder if SharedPrefixDecoder.supports(model) else ExpandedDecoder
    decoder = kind(model, ROLLOUT.completion_length)
    model.set_attn_implementation(decoder.attention)
    rows = torch.arange(ROLLOUT.completions)
    lengths = [18, 18 + 31] * 6
    if not turns:
        lengths, rows = [18] * 3, torch.arange(3).repeat_interleave(4)
    with torch.no_grad():
        decoder.prefill([[1 + i] * length for i, length in enumerate(lengths)], rows)
        for _ in range(ROLLOUT.completion_length):
            decoder.step(torch.ones(ROLLOUT.completions, dtype=torch.int64))
    parts = tree_leaves([list(vars(layer).values()) for layer in decoder.cache.layers])
    tensors = sorted((part for part in parts if isinstance(part, torch.Tensor)), key=lambda part: part.nbytes)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("family", "dtype", "turns"),
    [
        ("qwen2", "bfloat16", False),
        ("gpt_neox", "float32", False),
        ("gemma3_text", "bfloat16", False),
        ("qwen2", "float32", True),
        ("gpt_neox", "float32", True),
    ],
)
def test_keys_and_values_are_what_the_engine_holds(
    family: str, dtype: str, turns: bool, config: Any, predictor: Any
) -> None:
    sections = {"rollout": {"tools": ["tools.py:add"]}} if turns else {}
    planned = predictor(config(family), sections=sections, dtype=dtype)
    model = AutoModelForCausalLM.from_config(planned.traces.config, dtype=planned.dtype).eval()

    held = decode(model, turns=turns)

    growing = planned.predict(ROLLOUT).parts["rollout"]["KV cache"]
    assert held <= growing <= 1.25 * held  # of one layer, a copy while it grows; windows keep a token less


def test_decoding_takes_what_was_predicted(traces: Traces, predictor: Any) -> None:
    planned = predictor(traces)
    parts = planned.predict(ROLLOUT).parts["rollout"]

    measured = peak_bytes(
        lambda: AutoModelForCausalLM.from_config(traces.config, dtype=planned.dtype).eval(),
        decode,
        torch.device("cpu"),
    )

    assert measured <= 1.05 * sum(parts[name] for name in ("weights", "KV cache", "engine workspace"))


def test_a_cpu_decodes_in_batches(traces: Traces, predictor: Any) -> None:
    many = replace(ROLLOUT, prompts=64, completion_length=512)

    rows = predictor(traces).rows_in_flight(many)

    held = -(-rows // 4) * many.prompt_length + rows * many.completion_length
    assert held <= 2**14 < held + many.completion_length + many.prompt_length
    large = {"rollout": {"max_batch_tokens": 10**6}}
    assert predictor(traces, sections=large).rows_in_flight(many) == 256
    assert "CUDA context" not in predictor(traces).predict(UPDATE).parts["update"]


def test_keys_and_values_are_those_in_flight_and_of_the_longest_sequence(
    traces: Traces, predictor: Any
) -> None:
    planned = predictor(traces, device_budget("H200"), attention="sdpa")
    page = BLOCK_TOKENS * planned.shape.paged_kv_bytes_per_token

    def rollout(**changes: int) -> dict[str, int]:
        return planned.predict(replace(ROLLOUT, **changes)).parts["rollout"]

    def pages(**changes: int) -> float:
        return rollout(**changes)["KV cache"] / page

    # A prompt of 18 tokens fills one page; 18 + 32 tokens take four, so each completion three of its own.
    assert pages() == 3 * (1 + 4 * 3) + 1
    assert pages(most_in_flight=5) == 3 + 5 * 3 + 1
    assert pages(most_in_flight=2) == 2 + 2 * 3 + 1  # of two prompts at most
    assert pages(most_in_flight=1, longest=161) == 11 + 1
    sampler = [rollout(most_in_flight=n)["engine workspace"] for n in (12, 2)]
    assert sampler[0] - sampler[1] == 10 * 3 * 4 * planned.shape.vocabulary
