from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_fast.config.policy import LoraConfig
from grpo_fast.plan.devices import device_budget
from grpo_fast.plan.measure import calibrated, measured_update, peak_bytes
from grpo_fast.plan.model_shape import Shapes, model_config, with_layers
from grpo_fast.plan.prediction import Prediction, Predictor
from grpo_fast.plan.search import with_values
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.rollout.handover import MARGIN
from grpo_fast.rollout.transformers import CPU_BATCH_TOKENS

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
        ("gemma4_text", "bfloat16", {}, {}, UPDATE, 0.05),
        ("gpt_neox", "bfloat16", CHECKPOINTED, {}, UPDATE, 0.05),
        ("qwen3_5_text", "float32", {}, {}, UPDATE, 0.08),
        ("lfm2", "float32", {}, {}, UPDATE, 0.05),
        ("bloom", "float32", {}, {}, SCORES, 0.15),  # by its own attention
        ("qwen3_moe", "bfloat16", MLPS, {}, UPDATE, 0.05),
        ("gemma2", "float32", {}, {}, SCORES, 0.08),  # which a CPU keeps
        ("granite_swa", "float32", {}, {}, SCORES, 0.05),
        ("llama", "float32", {}, {}, SEVERAL, 0.03),
        ("llama", "bfloat16", MLPS, {}, LONG, 0.04),  # in tiles
        ("llama", "float32", CHECKPOINTED, {}, LONG, 0.08),
        ("llama", "bfloat16", QLORA | OFFLOADED, {}, LONG, 0.04),
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


@pytest.mark.parametrize("way", [{}, CHECKPOINTED, MLPS], ids=str)
def test_an_update_of_experts_adapters_holds_the_experts_they_are_added_to(
    way: dict[str, Any], config: Any, predictor: Any
) -> None:
    """Of all layers at a time, or of one: they are most of what there is."""
    wide = config("qwen3_moe", num_experts=16, moe_intermediate_size=256)

    compare(predictor(wide, dtype="bfloat16", **LORA | way), UPDATE, 0.05)


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
    lengths = {"dataset.max_prompt_length": 40, "rollout.max_completion_length": 32}
    given = with_values(planned.run, lengths), planned.shapes
    found = calibrated(*given, planned.device).transient
    doubled = calibrated(*given, replace(planned.device, transient=2.0)).transient

    assert found == pytest.approx(1, abs=0.05)
    assert doubled == pytest.approx(found, abs=0.05)


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)


@pytest.fixture(scope="module")
def shapes(config: Any) -> Shapes:
    return Shapes(config())


@pytest.fixture
def on_gpu(shapes: Shapes, predictor: Any) -> Any:
    """`on_gpu(memory={...})`: what an H200 takes of a bfloat16 model with vLLM, with other settings."""

    def predict(**sections: Any) -> Prediction:
        sections = {"memory": {"offload": "none"}} | sections
        settings = {"dtype": "bfloat16", "attention": "flash_attention_2"}
        return predictor(shapes, device_budget("H200"), sections, **settings).predict(UPDATE)

    return predict


def test_what_an_engine_and_a_reference_cost(on_gpu: Any) -> None:
    plain = on_gpu()
    weights, kv_cache = plain.parts["update"]["weights"], plain.parts["rollout"]["KV cache"]
    assert "KV cache" not in plain.parts["update"]

    awake = on_gpu(rollout={"vllm": {"sleep_level": 0}})
    assert awake.total("update") - plain.total("update") == kv_cache
    with_reference = on_gpu(loss={"beta": 0.1})
    assert with_reference.total("update") - plain.total("update") == weights


def test_what_is_offloaded_is_away_in_the_rollout_and_state_in_the_backward_too(
    on_gpu: Any, shapes: Shapes, predictor: Any
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
    assert predictor(shapes, sections={"memory": {"offload": ["optimizer"]}}).offloaded == ()  # on a CPU


def test_state_that_visits_the_device_takes_three_tensors_in_a_row(predictor: Any, config: Any) -> None:
    """Beside little to compute: one token a completion, and a head much larger than the layers."""
    shapes = Shapes(config("llama", vocab_size=2**15))
    sizes = StepSizes(1, 2, prompt_length=1, completion_length=2, micro_batch_tokens=1)
    offload = {"memory": {"offload": ["optimizer", "master"]}}
    planned = predictor(shapes, device_budget("H200"), offload, dtype="bfloat16", attention="sdpa")

    parts = planned.predict(sizes).parts["update"]

    # The embedding, then the first layer's q and k; the head comes last, after a norm of 128 numbers.
    numbers = max(2**15 * 128 + 128 * 128 + 64 * 128, 2**15 * 128 + 128 + 128)
    assert planned.shape.largest_three_adjacent == numbers
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
    planned = predictor(Shapes(config(family)), device_budget("H200"), sections, dtype="bfloat16", **keys)

    assert (planned.weights.shared, planned.weights.sent) == (shared, sent)
    adapters = planned.shape.parameters.get("adapters", 0)
    own = 0 if shared else sum(planned.shape.parameters.values()) - adapters
    own += adapters * (keys == QLORA or "lora_sync" in vllm)
    assert planned.predict(UPDATE).parts["rollout"].get("engine weights", 0) == 2 * own


def decode(model: torch.nn.Module, sizes: StepSizes = ROLLOUT, *, turns: bool = False) -> int:
    """Bytes of keys and values when every completion is at its longest; with turns, of its last turn."""
    longest, prompts = sizes.prompt_length, sizes.prompts
    if turns:
        longest, prompts = sizes.sequence_length - 1, sizes.completions
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    read = torch.ones(prompts, longest, dtype=torch.int64)
    rows = torch.arange(prompts).repeat_interleave(sizes.completions // prompts)
    with torch.no_grad():
        model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.reorder_cache(rows)
        for ids in read.new_ones(sizes.completion_length, sizes.completions, 1):
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    parts = tree_leaves([list(vars(layer).values()) for layer in cache.layers])
    tensors = sorted((part for part in parts if isinstance(part, torch.Tensor)), key=lambda part: part.nbytes)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen2", "bfloat16"),
        ("gpt_neox", "float32"),
        ("gemma3_text", "bfloat16"),
        ("minicpm3", "bfloat16"),
        ("qwen3_5_text", "bfloat16"),
        ("falcon_h1", "float32"),
    ],
)
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.builds(
        StepSizes,
        prompts=st.integers(1, 4),
        generations=st.sampled_from([2, 4, 6]),
        prompt_length=st.integers(9, 40),
        completion_length=st.integers(2, 40),
        micro_batch_tokens=st.just(1000),
    ),
    turns=st.booleans(),
)
def test_keys_and_values_are_what_the_engine_holds(
    family: str, dtype: str, config: Any, predictor: Any, sizes: StepSizes, turns: bool
) -> None:
    sections = {"rollout": {"tools": ["tools.py:add"]}} if turns else {}
    planned = predictor(config(family), sections=sections, dtype=dtype)
    model = AutoModelForCausalLM.from_config(planned.shapes.config, dtype=planned.dtype).eval()

    held = decode(model, sizes, turns=turns)

    found = planned.predict(sizes).parts["rollout"]["KV cache"]
    assert held <= found <= 1.25 * held  # windows keep a token less


def test_decoding_takes_what_was_predicted(shapes: Shapes, predictor: Any) -> None:
    planned = predictor(shapes)
    parts = planned.predict(ROLLOUT).parts["rollout"]

    measured = peak_bytes(
        lambda: AutoModelForCausalLM.from_config(shapes.config, dtype=planned.dtype).eval(),
        decode,
        torch.device("cpu"),
    )

    assert measured <= 1.05 * sum(parts[name] for name in ("weights", "KV cache", "engine workspace"))


def test_a_cpu_decodes_in_batches(shapes: Shapes, predictor: Any) -> None:
    many = replace(ROLLOUT, prompts=64, completion_length=512)

    rows = predictor(shapes).engine_price(many).rows

    assert rows * many.sequence_length <= CPU_BATCH_TOKENS < (rows + 1) * many.sequence_length
    large = {"rollout": {"max_batch_tokens": 10**6}}
    assert predictor(shapes, sections=large).engine_price(many).rows == 256
    assert "CUDA context" not in predictor(shapes).predict(UPDATE).parts["update"]
