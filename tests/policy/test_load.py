"""What a loaded policy is: its head, what of it trains, and which models, devices and data are refused."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.cli import main
from grpo_fast.config.policy import ModelConfig
from grpo_fast.distributed.world import World
from grpo_fast.policy import load as load_module
from grpo_fast.policy import load_policy, longest_sequence
from grpo_fast.policy.architecture import _REFUSED, check_architecture, packing_obstacle, verify_policy
from grpo_fast.policy.load import (
    faster_dtype,
    resolve_attention,
    resolve_device,
    resolve_dtype,
    resolve_packing,
)
from grpo_fast.policy.vision import model_class
from grpo_fast.rollout.agreement import evaluation_mode
from tests import tiny


def loses_the_layout(policy):
    attention = policy.model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, packed_layout=None, **kwargs: forward(*args, **kwargs)


def ignores_positions(policy):
    rotary = policy.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])


def scales_its_logits_otherwise(policy):
    policy.model.config.logit_scale = 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "spoil"),
    [("llama", loses_the_layout), ("llama", ignores_positions), ("granite", scales_its_logits_otherwise)],
)
def test_a_model_that_packing_does_not_support_is_refused(load, family, spoil, dtype):
    policy = load(family, dtype=dtype)
    verify_policy(policy)

    spoil(policy)

    with pytest.raises(ValueError, match=r"packed logits.*model\.attention"):
        verify_policy(policy)


def test_in_16_bits_packed_logits_may_differ_by_the_models_own_rounding(load):
    policy = load("llama", dtype="bfloat16")
    for name, parameter in policy.model.named_parameters():
        if "layers" in name and parameter.ndim > 1:
            parameter.data *= 0.1  # layers that add little to what goes through, as a trained model's
    verify_policy(policy)

    policy.model.config.logit_scale = 1.09

    with pytest.raises(ValueError, match=r"by 0\.09 of their norm \(0\.0\d+ allowed\)"):
        verify_policy(policy)


@pytest.mark.parametrize(
    ("families", "problem"),
    [
        (["llama4_text", "deepseek_v32"], "layers of type"),
        (["bloom", "falcon", "stablelm"], "computes its attention by itself"),
        pytest.param(["jamba"], "Mamba 1", marks=tiny.since("5.17")),
        pytest.param(["qwen3_next", "granitemoehybrid", "lfm2"], "None", marks=tiny.since("5.17")),
    ],
)
def test_what_cannot_be_packed_is_known_from_the_configuration(families, problem):
    for family in families:
        tiny.require_family(family)
        architecture = AutoConfig.for_model(family)
        check_architecture(architecture)
        assert problem in str(packing_obstacle(architecture))
        assert resolve_packing(ModelConfig(path="-"), architecture) == (problem == "None")
        assert not resolve_packing(ModelConfig(path="-", packing="none"), architecture)


@pytest.mark.parametrize("family", ["blt", "t5", "emu3", "mllama", *_REFUSED])
def test_what_cannot_be_trained_is_refused_by_its_configuration(family):
    # transformers' own defaults of a drafter are none that it takes.
    drafter = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    tiny.require_family(family)
    given = {"text_config": drafter} if family == "gemma4_assistant" else {}
    with pytest.raises(ValueError, match=rf"model_type = '{family}' .*; give .*, such as Qwen3"):
        check_architecture(AutoConfig.for_model(family, **given))


def test_a_window_that_layers_keep_to_themselves_is_not_packed(load, folder_of, caplog):
    """Phi-3.5-MoE's is in its mask alone, which packing replaces; no short text would tell."""
    for window, packs in ((40, False), (256, True)):
        path = str(folder_of("phimoe", sliding_window=window))
        assert load_policy(ModelConfig(path=path, dtype="float32", device="cpu")).packs == packs
    assert "a window of 40 tokens" in caplog.text


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"full_attention": {"rope_type": "linear", "factor": 3.0}}, 768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
    ],
    ids=str,
)
def test_a_sequence_longer_than_the_positions_is_refused_with_both_numbers(rope, positions, load):
    policy = load("llama")
    policy.base_model.config.rope_parameters = rope or policy.base_model.config.rope_parameters

    assert longest_sequence(policy, [[4, 60], [6] * 11], positions - 11) == positions
    with pytest.raises(ValueError, match=rf"need {positions + 1} positions.* has {positions} .*rope_scaling"):
        longest_sequence(policy, [[6] * 12, [4, 5]], positions - 11)
    with pytest.raises(ValueError, match=r"token 61 .*61 rows"):
        longest_sequence(policy, [[3], [4, 61]])


def test_all_linear_adapts_all_but_the_head_and_only_its_dropout_is_on(load):
    policy = load("qwen2", lora={"r": 2, "dropout": 0.25}, dtype="bfloat16")

    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in policy.trainable()}

    assert adapted == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    training = [module for module in policy.model.modules() if module.training]
    assert {m.p for m in training if not [*m.children()]} == {0.25}  # its dropouts, and their containers


@pytest.mark.parametrize("family", ["opt", "seed_oss", "mixtral", "phimoe"])
def test_dropout_jitter_and_drawn_experts_are_off_in_what_trains(load, batch, family):
    """As in OPT's numbers, Seed-OSS's residuals, Mixtral's router and Phi's, which draws experts."""
    policy = load(family, gradient_checkpointing=True)
    with evaluation_mode(policy.model):
        expected = policy.hidden_states(batch)
    torch.testing.assert_close(policy.hidden_states(batch), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("family", "table"), [("llama", "model.embed_tokens"), ("qwen2", "lm_head")])
def test_a_head_and_its_tied_embedding_are_frozen_together_and_not_adapted(load, family, table):
    frozen = load(family, train_lm_head=False).trainable().keys()
    assert load(family).trainable().keys() - frozen == {f"{table}.weight"}
    with pytest.raises(
        ValueError, match=rf"model\.lora\.target_modules = .*{table}.* reaches the output head"
    ):
        load(family, lora={"r": 2, "target_modules": [table]})


def test_a_chat_template_comes_from_a_file_and_padding_is_the_end_token(load, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}!")

    tokenizer = load("llama", chat_template=str(file)).tokenizer

    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert tokenizer.pad_token == "</s>"
    with pytest.raises(ValueError, match=r"model\.chat_template = .* cannot be read"):
        load("llama", chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("faster", ["bfloat16", "float32"])
def test_auto_is_the_faster_dtype_on_a_cpu_and_bfloat16_on_a_gpu(load, monkeypatch, caplog, faster):
    monkeypatch.setattr(load_module, "_product_seconds", lambda dtype: 1 if faster in str(dtype) else 4)
    faster_dtype.cache_clear()

    assert load("llama", dtype="auto").model.dtype == getattr(torch, faster)
    assert f"model.dtype = {faster}, which multiplies 4.0 times as fast as" in caplog.text
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"
    faster_dtype.cache_clear()


FLASH, SDPA = "flash_attention_2", "sdpa"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "family", "major", "chosen"),
    [
        ("auto", "cpu", "bfloat16", "llama", 9, SDPA),
        ("auto", "cuda", "bfloat16", "llama", 8, FLASH),
        ("auto", "cuda", "bfloat16", "llama", 7, SDPA),
        ("auto", "cuda", "float32", "llama", 9, SDPA),
        ("auto", "cuda", "bfloat16", "gemma2", 9, SDPA),
        (FLASH, "cuda", "float16", "llama", 9, FLASH),
        (SDPA, "cuda", "bfloat16", "llama", 9, SDPA),
        (FLASH, "cpu", "bfloat16", "llama", 9, "not on cpu in bfloat16"),
        (FLASH, "cuda", "float32", "llama", 9, "not on cuda in float32"),
        (FLASH, "cuda", "bfloat16", "gemma2", 9, "caps its scores, which needs flash-attn .*"),
        (FLASH, "cuda", "bfloat16", "llama", 7, "older than Ampere"),
        ("flash_attention_4", "cuda", "bfloat16", "llama", 9, "flash-attn-4, which is not installed"),
    ],
)
def test_attention_is_chosen_for_device_dtype_and_model_or_refused(
    monkeypatch, name, device, dtype, family, major, chosen
):
    arguments = (name, torch.device(device), dtype, AutoConfig.for_model(family))
    model_class(arguments[-1])  # its first import asks torch for the GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    if chosen in (FLASH, SDPA):
        assert resolve_attention(*arguments) == chosen
    else:
        with pytest.raises(ValueError, match=f"model.attention = '{name}'.*{chosen}; give auto"):
            resolve_attention(*arguments)


def test_what_a_device_is_not_or_does_not_have_is_refused(load, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == torch.device("cpu")
    for name, problem in (("cuda:1", "finds no CUDA device"), ("gpu", "is not a device")):
        with pytest.raises(ValueError, match=problem):
            resolve_device(name)
    for settings, problem in (
        ({"liger_kernels": True}, r"model\.liger_kernels = true needs a CUDA device"),
        ({"gradient_checkpointing": "offload"}, "'offload'.*model.device is cpu; set it to true"),
        ({"head": "triton"}, r"model\.head = 'triton' needs Triton and a GPU .* is cpu; set it to auto"),
    ):
        with pytest.raises(ValueError, match=problem):
            load("llama", **settings)


def test_a_missing_triton_is_an_error_or_a_warning_with_the_remedy(monkeypatch, caplog):
    find, device = load_module.importlib.util.find_spec, torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda n, *a: None if n == "triton" else find(n, *a))
    remedy = "Triton is not installed: pip install 'grpo-fast[triton]'"

    with pytest.raises(ValueError, match=re.escape(f"model.head = 'triton': {remedy}, or set it to auto")):
        load_module.require_head(ModelConfig(path="-", head="triton"), device)
    load_module.require_head(ModelConfig(path="-", head="reference"), device)
    assert not caplog.messages
    load_module.require_head(ModelConfig(path="-"), device)
    assert remedy in caplog.text


NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
FILES = [
    ({"version": NVRM}, "535.129.03"),
    ({"nvidia-smi": "#!/bin/sh\necho 551.86\n"}, "551.86"),
    ({"nvidia-smi": "#!/bin/sh\nexit 9\n"}, None),
]


@pytest.mark.parametrize(("files", "driver"), FILES)
def test_a_driver_that_torch_cannot_use_is_refused_at_once(tmp_path, monkeypatch, capsys, files, driver):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("grpo_fast.policy.driver.KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    if driver is None:
        assert resolve_device("auto") == torch.device("cpu")
        return
    named = f"built for CUDA 13.0 .* NVIDIA driver {driver} .*update the driver"
    with pytest.raises(ValueError, match=f"{named}.*set model.device = cpu"):
        resolve_device("auto")
    with pytest.raises(ValueError, match=f"'cuda', but .*{named}"):
        resolve_device("cuda")
    assert main(["doctor"]) == 1 and driver in capsys.readouterr().out
    assert resolve_device("cpu") == torch.device("cpu")
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert resolve_device("auto") == torch.device("cpu")


def test_ranks_that_loaded_other_weights_are_refused(load, monkeypatch):
    """The second rank's weights are the first's, one of them moved by its last bits."""

    def exchanged(world, place, work):
        return [work(), other] if place == "the weights" else [work()]

    monkeypatch.setattr(World, "gather_from_all", exchanged)
    policy = load("llama")
    other, config = load_module._checksum(policy.model), policy.model.config
    ranks = {"config": ModelConfig(path=config._name_or_path, dtype="float32"), "world": World(0, 2)}
    load_policy(**ranks)
    next(policy.model.parameters()).data.view(-1)[0] *= 1 + 1e-6
    other = load_module._checksum(policy.model)
    with pytest.raises(ValueError, match="not the same on all ranks"):
        load_policy(**ranks)
