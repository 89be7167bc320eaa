"""Low-rank adapters of experts in one tensor: which are made, what they compute, how they are merged."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.config.policy import LoraConfig, ModelConfig
from grpo_fast.policy import Policy, adapters
from grpo_fast.policy.adapters import adapted_weights, merged
from grpo_fast.policy.experts import is_expert
from grpo_fast.policy.load import prepare_to_train
from tests.policy.conftest import small_config
from tests.tiny import since

MIXTURES = (
    *("afmoe", "aria_text", "cohere2_moe", "ernie4_5_moe", "flex_olmo", "gemma4_text", "gpt_oss"),
    *("granitemoe", "granitemoeshared", "jetmoe", "llama4_text", "minimax_m2", "mixtral", "nemotron_h"),
    *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)
WITH_ROUTER = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "solar_open")


def mixture(family, folder, **lora):
    """A random policy of this family, its adapters moved; it need not be one that can be packed."""
    config = small_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "layers" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    experts = (name for name, weight in model.named_parameters() if is_expert(name, weight))
    named = {re.sub(r".*\.\d+\.", "", name) for name in experts if not name.endswith("bias")}
    lora = {"target_parameters": sorted(named)} | lora
    settings = ModelConfig(path="-", lora=LoraConfig(r=2, **lora))
    policy = Policy(prepare_to_train(model, settings), AutoTokenizer.from_pretrained(folder))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return policy


@torch.no_grad()
def logprobs(model, ids):
    return model(input_ids=ids, use_cache=False).logits.log_softmax(-1)


@pytest.mark.parametrize(
    "family", [*MIXTURES, *(pytest.param(family, marks=since("5.13")) for family in WITH_ROUTER)]
)
@pytest.mark.drawn(8)
def test_experts_in_one_tensor_are_adapted_beside_the_attention_and_exported(
    folder_of, tmp_path, family, seed
):
    torch.manual_seed(seed)
    policy, ids = mixture(family, folder_of("llama")), torch.randint(4, 60, (2, 14))
    names = policy.changing_weights()

    policy.save_pretrained(tmp_path)

    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    with policy.reference() as reference:
        before = logprobs(reference.model, ids)
    found = logprobs(policy.model, ids)
    assert (logprobs(exported, ids) - found).abs().mean() < 1e-5 < 1e-3 < (before - found).abs().mean()
    weights = policy.base_weights()
    experts = {name for name, weight in weights.items() if weight.ndim == 3 and "conv" not in name}
    assert experts and experts < names and any(".q" in n or "attention" in n for n in names)
    assert dict(policy.named_weights()).keys() == weights.keys() > names


@pytest.mark.parametrize("family", WITH_ROUTER)
def test_a_router_of_which_a_weight_is_read_without_a_call_is_refused(folder_of, monkeypatch, family):
    if family != "deepseek_v2":  # whose old router alone is a linear layer
        monkeypatch.setattr(adapters, "_ROUTERS", Version("99"))
    elif Version(version("transformers")) >= adapters._ROUTERS:
        pytest.skip("the router reads its own weight")
    remedy = "list target_modules without 'gate'"
    with pytest.raises(ValueError, match=rf"'all-linear' reaches a router, .*; {remedy}, or install"):
        mixture(family, folder_of("llama"), target_parameters=None)


@pytest.mark.parametrize(("family", "by_itself"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_all_linear_warns_of_experts_that_peft_does_not_adapt_by_itself(folder_of, caplog, family, by_itself):
    names = mixture(family, folder_of("llama"), target_parameters=None).changing_weights()

    assert any("experts" in name for name in names) == by_itself
    remedy = "target_parameters = ['mlp.experts.down_proj', 'mlp.experts.gate_up_proj'] would"
    assert (remedy in caplog.text) == (not by_itself)


def with_shared_layers(folder, **lora):
    """Of Zamba 2: the attention and MLP of its hybrid layers are the same."""
    config = small_config("zamba2")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    settings = ModelConfig(path="-", lora=LoraConfig(r=2, **lora))
    return Policy(prepare_to_train(model, settings), AutoTokenizer.from_pretrained(folder))


def test_all_linear_leaves_out_what_layers_share_and_what_kernels_read(folder_of, tmp_path):
    policy, ids = with_shared_layers(folder_of("llama")), torch.arange(4, 20)[None]
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    names = policy.changing_weights()

    policy.save_pretrained(tmp_path)

    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(logprobs(exported, ids), logprobs(policy.model, ids), rtol=0, atol=1e-5)
    assert any("mamba.in_proj" in name for name in names)
    assert not [name for name in names if "shared_transformer.self_attn.q_proj" in name]
    assert not [name for name in names if "mamba.out_proj" in name]
    with pytest.raises(ValueError, match=r"reaches .*q_proj, whose weight several layers share"):
        with_shared_layers(folder_of("llama"), target_modules=["q_proj"])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])  # whose tensors lie in both orders
def test_what_is_merged_is_what_peft_adds_rounded_once(folder_of, family, seed):
    torch.manual_seed(seed)
    policy = mixture(family, folder_of("llama"))
    policy.model.bfloat16()
    for _, layer in adapted_weights(policy.base_model):
        of_experts = hasattr(layer, "parameter_name")
        base = (layer.get_param() if of_experts else layer.get_base_layer().weight).float()
        delta = layer.float().get_delta_weight("default")
        layer.bfloat16()
        torch.testing.assert_close(merged(layer).float(), base + delta, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"target_modules": ["nonsense"], "target_parameters": None}, r"target_modules = \['nonsense'\]"),
        ({"target_modules": "("}, r"target_modules = '\(', .*: '\(' is no regular expression"),
        ({"target_modules": "(?:.|.)*!"}, "matches the whole name of no module"),
        ({"target_modules": ["lm_head"]}, r"target_modules = \['lm_head'\].* reaches the output head"),
        ({"target_modules": ["mlp"]}, r"(?s)target_modules = \['mlp'\].*: Target module .* is not supported"),
        ({"dropout": 0.1}, r"target_parameters = .*lora_dropout"),
    ],
)
def test_what_experts_cannot_be_adapted_by_is_refused(folder_of, lora, problem):
    with pytest.raises(ValueError, match=problem):
        mixture("qwen3_moe", folder_of("llama"), **lora)
