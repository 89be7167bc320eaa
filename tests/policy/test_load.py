from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.load import resolve_attention, resolve_device, resolve_source


def test_all_linear_adapts_every_projection_but_the_head(load: Callable[..., Policy]) -> None:
    policy = load("qwen2", lora={"r": 2}, dtype="bfloat16")

    trainable = policy.trainable()

    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trainable} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert policy.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "names"), [("llama", ["model.embed_tokens.weight"]), ("qwen2", ["lm_head.weight"])]
)
def test_a_frozen_head_takes_a_tied_embedding_with_it(
    load: Callable[..., Policy], family: str, names: list[str]
) -> None:
    everything = load(family).trainable().keys()

    frozen = load(family, train_lm_head=False).trainable().keys()

    assert everything - frozen == set(names)


@pytest.mark.parametrize(
    ("family", "target"), [("qwen2", "lm_head"), ("llama", "embed_tokens"), ("llama", "nonsense")]
)
def test_lora_on_the_head_or_on_unknown_modules_is_refused(
    load: Callable[..., Policy], family: str, target: str
) -> None:
    with pytest.raises(ValueError, match=rf"model\.lora\.target_modules = .*{target}"):
        load(family, lora={"r": 2, "target_modules": [target]})


def test_dropout_of_the_model_is_off_and_that_of_lora_stays(load: Callable[..., Policy]) -> None:
    policy = load("llama", lora={"r": 2, "dropout": 0.25})

    assert {module.p for module in policy.model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


def test_a_chat_template_comes_from_a_file(load: Callable[..., Policy], tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}!")

    policy = load("llama", chat_template=str(file))

    text = policy.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "hi!"
    with pytest.raises(ValueError, match=r"model\.chat_template = .* cannot be read"):
        load("llama", chat_template=str(tmp_path / "none.jinja"))


def test_a_tokenizer_without_padding_pads_with_its_end_token(load: Callable[..., Policy]) -> None:
    assert load("llama").tokenizer.pad_token == "</s>"


def test_a_path_that_holds_no_safetensors_model_is_named(
    tmp_path: Path, folder_of: Callable[..., Path]
) -> None:
    config = folder_of("llama") / "config.json"
    for path, problem in (
        (tmp_path / "missing", "no such folder"),
        (tmp_path, r"has no config\.json"),
        (config, "is a file"),
    ):
        with pytest.raises(ValueError, match=problem):
            resolve_source(str(path))
    (tmp_path / "config.json").write_text(config.read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.path.*pytorch_model\.bin"):
        load_policy(ModelConfig(path=str(tmp_path)))
    assert resolve_source("owner/name") == "owner/name"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("flash_attention_2", "cpu", "bfloat16", "needs CUDA and a 16-bit dtype"),
        ("flash_attention_2", "cuda", "float32", "needs CUDA and a 16-bit dtype"),
        ("flex_attention", "cpu", "float32", "no gradients on the CPU"),
    ],
)
def test_an_attention_that_cannot_run_is_refused(name: str, device: str, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_attention(name, torch.device(device), dtype)


def test_attention_is_chosen_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr("grpo_fast.policy.load.find_spec", lambda name: object())

    assert resolve_attention("auto", torch.device("cpu"), "bfloat16") == "sdpa"
    assert resolve_attention("auto", cuda, "bfloat16") == "flash_attention_2"
    assert resolve_attention("auto", cuda, "float32") == "flex_attention"
    monkeypatch.setattr("grpo_fast.policy.load.find_spec", lambda name: None)
    assert resolve_attention("auto", cuda, "bfloat16") == "flex_attention"
    with pytest.raises(ImportError, match="pip install flash-attn"):
        resolve_attention("flash_attention_2", cuda, "bfloat16")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="finds no CUDA device"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="is not a device"):
        resolve_device("gpu")


def test_liger_kernels_need_a_gpu(load: Callable[..., Policy]) -> None:
    with pytest.raises(ValueError, match=r"model\.liger_kernels = true needs a CUDA device"):
        load("llama", liger_kernels=True)
