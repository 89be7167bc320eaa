"""A base in 4 bits: its numbers are bitsandbytes', adapters train on it, and it leaves in full precision."""

from __future__ import annotations

import json

import bitsandbytes as bnb
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.policy import ModelConfig
from grpo_fast.distributed.world import World
from grpo_fast.policy import load_policy, load_tokenizer, quantization

LORA = {"r": 4}


@pytest.fixture
def saved(tmp_path, folder_of):
    """A model of the family as transformers saves it in these bits."""

    def save(family, **bits):
        source = folder_of(family)
        settings = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
        settings["quantization_config"] = BitsAndBytesConfig(**bits)
        model = AutoModelForCausalLM.from_pretrained(source, **settings)
        model.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
        return tmp_path

    return save


def difference(ours, theirs):
    """As a share of the norm."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).norm() / theirs.norm())


def test_every_linear_layer_but_the_head_is_rounded_to_nf4_and_nothing_else(load):
    plain = dict(load("qwen2").named_weights())
    lora = {**LORA, "target_modules": ["v_proj"]}
    policy = load("qwen2", quantization="nf4", lora=lora)

    for name, weight in policy.named_weights():
        expected = plain[name]
        if "_proj.weight" in name:
            packed, state = bnb.functional.quantize_4bit(expected, compress_statistics=True, quant_type="nf4")
            expected = bnb.functional.dequantize_4bit(packed, state)
            assert not expected.equal(plain[name])
        assert weight.equal(expected), name
    unquantized = load("qwen2", lora=lora)
    assert policy.quantized and not unquantized.quantized
    bases = (p for n, p in policy.model.named_parameters() if "_proj" in n and ".lora" not in n)
    assert {p.dtype for p in bases if p.ndim > 1} == {torch.uint8}
    assert policy.token_costs == unquantized.token_costs


@pytest.mark.parametrize(
    ("bits", "dtype"), [(None, "float32"), (None, "bfloat16"), ("nf4", "float32"), ("fp4", "bfloat16")]
)
def test_adapters_on_it_train_as_on_a_plain_model_with_its_numbers(load, saved, batch, tmp_path, bits, dtype):
    """Also where the model was saved in 4 bits, in bfloat16, and whichever dtype it is trained in."""
    source = {"quantization": "nf4"}
    if bits:
        source = {"path": str(saved("qwen3", load_in_4bit=True, bnb_4bit_quant_type=bits))}
    torch.manual_seed(0)
    policy = load("qwen3", lora=LORA, dtype=dtype, needs_reference=True, **source)
    policy.save_pretrained(tmp_path / "plain")  # new adapters add nothing
    torch.manual_seed(0)
    plain = load("qwen3", path=str(tmp_path / "plain"), lora=LORA, dtype=dtype)
    before, gradients = policy.hidden_states(batch).detach(), []
    for each in (policy, plain):
        generator = torch.Generator().manual_seed(1)
        for parameter in each.trainable().values():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        hidden = each.hidden_states(batch)
        hidden.float().square().sum().backward()
        gradients.append([hidden, *(p.grad for p in each.trainable().values())])

    rounding = 1e-5 if dtype == "float32" else 0.03
    for ours, theirs in zip(*gradients, strict=True):
        assert difference(ours, theirs) < rounding
    with policy.reference() as reference:  # the base without adapters
        assert reference.hidden_states(batch).equal(before)
    assert difference(policy.hidden_states(batch), before) > 0.05
    policy.save_pretrained(tmp_path / "merged")
    merged = load("qwen3", path=str(tmp_path / "merged"), dtype=dtype)
    assert not merged.quantized
    assert difference(policy.hidden_states(batch), merged.hidden_states(batch)) < rounding


@pytest.mark.parametrize(
    ("family", "settings", "saved_as", "error", "message"),
    [
        ("llama", {}, None, ValueError, r"model\.quantization = 'nf4', .* model\.lora = \{\}"),
        ("qwen3_moe", {"lora": LORA}, None, ValueError, "mixture of experts"),
        ("gpt2", {"lora": LORA}, None, ValueError, "GPT-2"),
        ("llama", {"lora": LORA}, {"load_in_4bit": True}, ValueError, "already; leave model.quantization"),
        ("llama", {"lora": LORA, "quantization": None}, {"load_in_8bit": True}, ValueError, "in 8 bits"),
        ("llama", {"quantization": None}, {"load_in_4bit": True}, ValueError, r"model\.lora = \{\}"),
        ("llama", {"lora": LORA}, "missing", ImportError, r"pip install 'grpo-fast\[bitsandbytes\]'"),
    ],
)
def test_an_impossible_quantization_is_refused_before_any_weight_is_read(
    folder_of, tmp_path, monkeypatch, family, settings, saved_as, error, message
):
    config = json.loads((folder_of(family) / "config.json").read_text())
    if saved_as == "missing":
        monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    elif saved_as:
        config["quantization_config"] = {"quant_method": "bitsandbytes", **saved_as}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not read")

    with pytest.raises(error, match=message):
        load_tokenizer(ModelConfig(path=str(tmp_path), **{"quantization": "nf4", **settings}))


def test_sharded_ranks_are_told_to_replicate(folder_of):
    config = ModelConfig(path=str(folder_of("llama")), lora=LORA, quantization="nf4", device="cpu")

    with pytest.raises(ValueError, match=r"distributed\.mode = 'shard' .*replicate"):
        load_policy(config, world=World(0, 2), distributed=DistributedConfig(mode="shard"))


def test_a_head_in_4_bits_is_refused(load, saved):
    folder = saved("qwen2", load_in_4bit=True, llm_int8_skip_modules=["none"])

    with pytest.raises(ValueError, match="the output head is a Linear4bit"):
        load("qwen2", path=str(folder), lora=LORA)
