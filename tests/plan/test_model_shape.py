from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from grpo_fast.config.policy import LoraConfig, ModelConfig, OptimizerConfig
from grpo_fast.plan.model_shape import SHAPES, ModelShape, model_config, random_model, skeleton
from grpo_fast.policy import Policy, PolicyOptimizer
from grpo_fast.policy.price import price_layers

MIXTURES = {  # how each calls the number of experts, and of those a token visits
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok"),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok"),
}
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
def test_a_known_shape_in_any_case_has_the_published_number_of_parameters(name: str) -> None:
    model = random_model(model_config(name.lower()), ModelConfig(path="-"), attention="sdpa", device="meta")

    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_a_configuration_file_is_enough_and_an_unknown_name_is_answered_with_the_known_ones(
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
def test_the_parts_are_the_whole_model(family: str, config: Any) -> None:
    shape = ModelShape(skeleton(config(family), ModelConfig(path="-")))
    real = AutoModelForCausalLM.from_config(config(family), dtype=torch.bfloat16)

    assert sum(shape.parameters.values()) == sum(p.numel() for p in real.parameters())
    assert shape.bytes == sum(p.nbytes for p in real.parameters())
    assert shape.parameters["embedding"] == real.get_input_embeddings().weight.numel()
    assert "other" not in shape.parameters
    # layers, experts, matrices, hidden, width
    assert shape.parameters.get("experts", 0) == (3 * 4 * 3 * 128 * 32 if family == "qwen3_moe" else 0)
    assert ("head" in shape.parameters) == (not config(family).tie_word_embeddings)


@pytest.mark.parametrize(
    ("lora", "dtype", "kind"),
    [
        (None, "float32", "adamw"),
        (LoraConfig(r=4), "bfloat16", "adamw"),
        (None, "bfloat16", "adamw_8bit"),
    ],
)
def test_what_is_trained_is_what_the_optimiser_gets(
    lora: LoraConfig | None, dtype: str, kind: Any, config: Any
) -> None:
    model = ModelConfig(path="-", dtype=dtype, lora=lora, train_lm_head=lora is not None)
    shape = ModelShape(skeleton(config("llama"), model))

    real = random_model(config("llama"), model, attention="sdpa", device="cpu")
    trained = {name: p for name, p in real.named_parameters() if p.requires_grad}
    optimizer = PolicyOptimizer(trained, OptimizerConfig(kind=kind), total_steps=1)
    for parameter in trained.values():
        parameter.sum().backward()
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for each shape
        optimizer.step()

    assert shape.trained == sum(p.numel() for p in trained.values())
    assert shape.trainable_tensors == len(trained)
    assert 4 * shape.params_16bit == sum(t.nbytes for t in optimizer.masters().values())
    assert 4 * shape.params_16bit == sum(t.nbytes for t in optimizer.gradient_buffers().values())
    moments = sum(t.nbytes for t in optimizer.moments().values())
    assert shape.moments(kind) + 4 * shape.trainable_tensors == moments  # and steps
    assert shape.bytes == sum(p.nbytes for p in real.parameters())


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.drawn(3)
def test_of_a_mixture_a_token_visits_some_experts_and_their_adapters_and_all_are_resident(
    family: str, config: Any, seed: int
) -> None:
    dice = random.Random(seed)
    experts, rank = dice.randint(3, 6), dice.randint(1, 8)
    chosen = dice.randint(1, experts - 1)
    count, visited = MIXTURES[family]
    small = config(family, **{count: experts, visited: chosen})
    model = ModelConfig(path="-", dtype="bfloat16", lora=LoraConfig(r=rank))

    shape = ModelShape(skeleton(small, model))

    real = random_model(small, model, attention="eager", device="cpu")
    trained = [p.numel() for p in real.parameters() if p.requires_grad]
    assert sum(shape.parameters.values()) == sum(p.numel() for p in real.parameters())
    assert (shape.parameters["adapters"], shape.trainable_tensors) == (sum(trained), len(trained))
    assert shape.bytes == sum(p.nbytes for p in real.parameters())
    theirs = {n: p.numel() for n, p in real.named_parameters() if ".experts." in n and "shared" not in n}
    own = [count for name, count in theirs.items() if "lora_" not in name]
    assert shape.parameters["experts"] == sum(own)
    elsewhere = sum(theirs.values()) * (experts - chosen) / experts
    everything = sum(n for part, n in shape.parameters.items() if part not in ("embedding", "head"))
    assert shape.active == pytest.approx(everything - elsewhere, abs=len(theirs))
    costs = Policy(real, cast("Any", None)).token_costs
    assert costs.input == pytest.approx(shape.active, abs=len(theirs))


@pytest.mark.parametrize("saved", [False, True], ids=["quantised", "saved so"])
def test_a_base_in_4_bits_has_its_scales_beside_it(saved: bool, config: Any) -> None:
    """Of every 64 numbers a scale in float32 or, quantised as well, in 8 bits and float32 for 256 of them."""
    model = ModelConfig(path="-", lora=LoraConfig(r=4))
    plain = ModelShape(skeleton(config("llama"), model))
    quantised = config("llama")
    if saved:
        quantised.quantization_config = BitsAndBytesConfig(load_in_4bit=True).to_dict()
    else:
        model = model.model_copy(update={"quantization": "nf4"})

    shape = ModelShape(skeleton(quantised, model))

    assert (shape.parameters, shape.active, shape.params_16bit) == (
        plain.parameters,
        plain.active,
        plain.params_16bit,
    )
    blocks = [width * 128 // 64 for width in (128, 64, 64, 128, 256, 256, 256)]  # q, k, v, o, then the MLP's
    scales = 4 * sum(blocks) if saved else sum(n + 4 * -(-n // 256) + 4 * (256 + 1) for n in blocks)
    tables = 4 * 16 * len(blocks)
    assert plain.bytes - shape.bytes == 3 * (64 * sum(blocks) * (2 - 0.5) - scales - tables)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3_moe", {"dtype": "float32"}, "in bfloat16 only"),
        ("qwen2", {"lora": LoraConfig(target_modules=["absent"])}, r"model\.lora\.target_modules"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    family: str, settings: dict[str, Any], message: str, config: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        skeleton(config(family), ModelConfig(path="-", **settings))


@pytest.mark.parametrize("heads", [2, 4])
def test_a_models_own_attention_keeps_its_probabilities_for_each_pair_of_a_rows_tokens(heads: int) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=heads)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    price = price_layers(model, model.base_model, fused=False, own_attention=True)

    assert price.pairs == (4.0 * heads, 4.0 * heads)  # float32
