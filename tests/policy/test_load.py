from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from grpo_fast.distributed.world import World
from grpo_fast.policy import Policy, Sample, load_policy, pack
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.load import resolve_attention, resolve_device
from grpo_fast.policy.source import resolve_source

Load = Callable[..., Policy]


def test_all_linear_adapts_every_projection_but_the_head_and_only_its_dropout_is_on(load: Load) -> None:
    policy = load("qwen2", lora={"r": 2, "dropout": 0.25}, dtype="bfloat16")

    trainable = policy.trainable()

    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trainable} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    dropouts = [module.p for module in policy.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert set(dropouts) == {0.25}


def test_a_dropout_that_is_no_module_is_off(load: Load, samples: list[Sample]) -> None:
    (batch,) = pack(samples, max_tokens=10_000, device="cpu")
    policy = load("opt")
    assert torch.equal(policy.hidden_states(batch), policy.hidden_states(batch))


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "model.embed_tokens.weight"), ("qwen2", "lm_head.weight")]
)
def test_a_frozen_head_takes_a_tied_embedding_with_it(load: Load, family: str, name: str) -> None:
    frozen = load(family, train_lm_head=False).trainable().keys()
    assert load(family).trainable().keys() - frozen == {name}


@pytest.mark.parametrize(
    ("family", "target"), [("qwen2", "lm_head"), ("llama", "embed_tokens"), ("llama", "nonsense")]
)
def test_lora_on_the_head_or_on_unknown_modules_is_refused(load: Load, family: str, target: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.lora\.target_modules = .*{target}"):
        load(family, lora={"r": 2, "target_modules": [target]})


def test_a_chat_template_comes_from_a_file_and_padding_is_the_end_token(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}!")

    tokenizer = load("llama", chat_template=str(file)).tokenizer

    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert tokenizer.pad_token == "</s>"
    with pytest.raises(ValueError, match=r"model\.chat_template = .* cannot be read"):
        load("llama", chat_template=str(tmp_path / "none.jinja"))


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


FLASH, FLEX = "flash_attention_2", "flex_attention"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "family", "capability", "chosen"),
    [
        ("auto", "cpu", "bfloat16", "llama", (9, 0), "sdpa"),
        ("auto", "cuda", "bfloat16", "llama", (8, 0), FLASH),
        ("auto", "cuda", "bfloat16", "llama", (7, 5), FLEX),
        ("auto", "cuda", "float32", "llama", (9, 0), FLEX),
        ("auto", "cuda", "bfloat16", "gemma2", (9, 0), FLEX),
        (FLASH, "cuda", "float16", "llama", (9, 0), FLASH),
        ("sdpa", "cuda", "bfloat16", "llama", (9, 0), "sdpa"),
        (FLEX, "cuda", "bfloat16", "llama", (9, 0), FLEX),
        (FLASH, "cpu", "bfloat16", "llama", (9, 0), "not on cpu in bfloat16"),
        (FLASH, "cuda", "float32", "llama", (9, 0), "not on cuda in float32"),
        (FLASH, "cuda", "bfloat16", "gemma2", (9, 0), "caps its scores"),
        (FLASH, "cuda", "bfloat16", "llama", (7, 5), "older than Ampere"),
        (FLEX, "cpu", "float32", "llama", (9, 0), "no gradients on the CPU"),
    ],
)
def test_attention_is_chosen_for_device_dtype_and_model_or_refused(
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    device: str,
    dtype: str,
    family: str,
    capability: tuple[int, int],
    chosen: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    architecture = AutoConfig.for_model(family)

    def resolved() -> str:
        return resolve_attention(name, torch.device(device), dtype, architecture)

    if chosen in (FLASH, FLEX, "sdpa"):
        assert resolved() == chosen
    else:
        with pytest.raises(ValueError, match=f"model.attention = '{name}'.*{chosen}; give auto"):
            resolved()


def test_a_device_that_is_not_there_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="finds no CUDA device"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="is not a device"):
        resolve_device("gpu")
    with pytest.raises(ValueError, match=r"model\.liger_kernels = true needs a CUDA device"):
        load("llama", liger_kernels=True)


def test_ranks_that_loaded_other_weights_are_refused(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's weights are the first's, one of them moved by its last bits."""

    def exchanged(world: World, place: str, work: Callable[[], int]) -> list[int]:
        own, (model,) = work(), work.args  # type: ignore[attr-defined]
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] *= moved
        return [own, work()]

    monkeypatch.setattr(World, "together", exchanged)
    config = ModelConfig(path=str(folder_of("llama")), dtype="float32", device="cpu")
    moved = 1.0
    load_policy(config, world=World(0, 2))
    moved = 1 + 1e-6
    with pytest.raises(ValueError, match="not the same on all ranks"):
        load_policy(config, world=World(0, 2))
