from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from grpo_fast.config.policy import LoraConfig, ModelConfig, OptimizerConfig
from grpo_fast.plan.model_shape import (
    ADAM_BYTES,
    SHAPES,
    model_config,
    model_shape,
    random_model,
    with_layers,
)
from grpo_fast.policy import PolicyOptimizer
from grpo_fast.policy.load import prepare_to_train

FAMILIES = ["qwen2", "llama", "gemma3_text", "gpt_neox", "qwen3_moe"]
PUBLISHED = {  # parameters of the published weights, a tied head counted once
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_shape_has_the_published_number_of_parameters(name: str) -> None:
    model = random_model(model_config(name.lower()), ModelConfig(path="-"), attention="sdpa", device="meta")

    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_a_configuration_file_is_enough_and_an_unknown_name_refused(
    tmp_path: Path,
) -> None:
    model_config("SmolLM2-135M").save_pretrained(tmp_path)

    assert {model_config(str(tmp_path / name)).hidden_size for name in ("", "config.json")} == {576}
    with pytest.raises(ValueError, match=r"'./Qwen9'.*SmolLM2-135M, Qwen2.5"):
        model_config("./Qwen9")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ValueError, match=r"config\.json"):
        model_config(str(tmp_path))

    assert not marker.exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_counts_the_model_that_is_trained(family: str, config: Any) -> None:
    shape = model_shape(config(family), ModelConfig(path="-", dtype="bfloat16"))
    real = AutoModelForCausalLM.from_config(config(family), dtype=torch.bfloat16)

    assert shape.parameters == shape.trained == sum(p.numel() for p in real.parameters())
    assert shape.bytes == sum(p.nbytes for p in real.parameters())
    assert (len(shape.layers), shape.vocabulary, shape.hidden) == (3, 1000, 128)
    assert shape.experts == (family == "qwen3_moe")


@pytest.mark.parametrize(
    ("lora", "dtype", "kind"),
    [
        (None, "float32", "adamw"),
        (LoraConfig(r=4), "bfloat16", "adamw"),
        (None, "bfloat16", "adamw_8bit"),
    ],
)
def test_what_is_trained_is_what_the_optimizer_gets(
    lora: LoraConfig | None, dtype: str, kind: Any, config: Any
) -> None:
    model = ModelConfig(path="-", dtype=dtype, lora=lora, train_lm_head=lora is not None)
    shape = model_shape(config("llama"), model)

    real = random_model(config("llama"), model, attention="sdpa", device="cpu")
    real = prepare_to_train(real, model)
    trained = {name: p for name, p in real.named_parameters() if p.requires_grad}
    optimizer = PolicyOptimizer(trained, OptimizerConfig(kind=kind), total_steps=1)
    for parameter in trained.values():
        parameter.sum().backward()
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for each shape
        optimizer.step()

    assert shape.trained == sum(p.numel() for p in trained.values())
    assert shape.master_bytes == sum(t.nbytes for t in optimizer.masters().values())
    moments = sum(t.nbytes for t in optimizer.moments().values())
    assert ADAM_BYTES[kind] * shape.trained == pytest.approx(moments, rel=0.05)
    assert shape.bytes == sum(p.nbytes for p in real.parameters())


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "mixtral", "qwen3_moe"])
@pytest.mark.drawn(3)
def test_adapters_of_experts_are_counted_and_merged(family: str, config: Any) -> None:
    model = ModelConfig(path="-", dtype="bfloat16", lora=LoraConfig(r=4))

    shape = model_shape(config(family), model)

    real = prepare_to_train(random_model(config(family), model, attention="eager", device="cpu"), model)
    trained = [p.numel() for p in real.parameters() if p.requires_grad]
    assert shape.adapters == shape.trained == sum(trained)
    assert shape.parameters == sum(p.numel() for p in real.parameters())
    assert sum(shape.merged) > 0 and shape.experts


@pytest.mark.parametrize("saved", [False, True], ids=["quantized", "saved so"])
def test_a_base_in_4_bits_has_its_scales_beside_it(saved: bool, config: Any) -> None:
    """Of every 64 values a scale in float32 or, quantized as well, in 8 bits and float32 for 256 of them."""
    model = ModelConfig(path="-", dtype="bfloat16", lora=LoraConfig(r=4))
    plain = model_shape(config("llama"), model)
    quantized = config("llama")
    if saved:
        quantized.quantization_config = BitsAndBytesConfig(load_in_4bit=True).to_dict()
    else:
        model = model.model_copy(update={"quantization": "nf4"})

    shape = model_shape(quantized, model)

    values = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    scales = 4 / 64 if saved else 1 / 64 + 4 / (64 * 256)
    assert shape.parameters == plain.parameters
    assert plain.bytes - shape.bytes == pytest.approx(values * (2 - 0.5 - scales), rel=0.01)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen2", {"lora": LoraConfig(target_modules=["absent"])}, r"model\.lora\.target_modules"),
        ("qwen2", {"train_router": False}, "experts"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    family: str, settings: dict[str, Any], message: str, config: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        model_shape(config(family), ModelConfig(path="-", dtype="bfloat16", **settings))


@pytest.mark.parametrize("heads", [2, 4])
def test_an_attention_of_the_models_own_keeps_every_score(heads: int) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=heads)

    assert model_shape(config, ModelConfig(path="-", dtype="float32")).scoring_heads == heads


def test_fewer_layers_keep_their_kinds(config: Any) -> None:
    short = with_layers(config("gemma3_text"), 2)

    assert (short.num_hidden_layers, short.layer_types) == (2, ["sliding_attention"] * 2)
