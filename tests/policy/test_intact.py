from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from grpo_fast.policy import Policy, load_policy, longest_sequence
from grpo_fast.policy.architecture import check_architecture
from grpo_fast.policy.config import ModelConfig

Tensors = dict[str, torch.Tensor]
Spoil = Callable[[Path], None]
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


def tensors(change: Callable[[Tensors], Tensors]) -> Spoil:
    """Another set of tensors in the folder's only file of weights."""

    def spoil(folder: Path) -> None:
        changed = change(load_file(folder / "model.safetensors"))
        whole = {name: tensor.clone() for name, tensor in changed.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def text(name: str, content: str | None) -> Spoil:
    """A file with other content; None: without it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_text(content)


def without(*names: str) -> Spoil:
    return tensors(lambda held: {name: tensor for name, tensor in held.items() if name not in names})


def with_tensor(name: str, *shape: int) -> Spoil:
    return tensors(lambda held: {**held, name: torch.ones(shape)})


def with_value(name: str, value: float) -> Spoil:
    return tensors(lambda held: {**held, name: held[name].index_fill(0, torch.tensor(5), value)})


def sharded(folder: Path) -> None:
    """An index that names a file which is not there."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    files = {name: f"model-{1 + (name == UP)}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def fewer_rows(folder: Path) -> None:
    config(vocab_size=60)(folder)
    tensors(lambda held: {**held, EMBEDDING: held[EMBEDDING][:60]})(folder)


@pytest.fixture
def load_spoilt(folder_of: Callable[..., Path], tmp_path: Path) -> Callable[..., Policy]:
    """Loads a copy of a saved Llama after something was done to its folder."""

    def load(spoil: Spoil, **settings: Any) -> Policy:
        folder = tmp_path / "model"
        shutil.copytree(folder_of("llama"), folder)
        spoil(folder)
        return load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu", **settings))

    return load


NOT_ITS_MODELS = {
    "a tensor missing": (without(UP), [f"missing: {UP}"]),
    "an untied head missing": (config(tie_word_embeddings=False), ["missing: lm_head.weight"]),
    "a layer that the configuration does not have": (
        config(num_hidden_layers=1),
        ["not the model's: model.layers.1.", "and 5 more"],
    ),
    "a classifier": (with_tensor("score.weight", 2, 32), ["not the model's: score.weight"]),
    "another width": (config(intermediate_size=64), ["of another shape", "(48, 32) for (64, 32)"]),
    "saved while compiled": (
        tensors(lambda held: {f"_orig_mod.{name}": tensor for name, tensor in held.items()}),
        [f"missing: lm_head.weight, {EMBEDDING}", f"_orig_mod.{EMBEDDING}"],
    ),
    "a NaN": (with_value(UP, float("nan")), [UP, "NaN or infinity"]),
    "an infinity": (with_value(EMBEDDING, float("-inf")), ["NaN or infinity"]),
}


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("case", NOT_ITS_MODELS)
def test_a_checkpoint_that_is_not_its_models_is_refused_by_the_tensors_names(
    case: str, lora: Any, load_spoilt: Callable[..., Policy]
) -> None:
    spoil, words = NOT_ITS_MODELS[case]

    with pytest.raises(ValueError, match=r"model\.path") as caught:
        load_spoilt(spoil, lora=lora)

    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "spoil",
    [
        tensors(lambda held: {**held, "lm_head.weight": held[EMBEDDING]}),
        with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        tensors(lambda held: {name.removeprefix("model."): tensor for name, tensor in held.items()}),
    ],
    ids=["a tied head repeated", "constants of old versions", "of the model without its head"],
)
def test_what_is_tied_or_constant_may_be_there_or_not(
    spoil: Spoil, load_spoilt: Callable[..., Policy], folder_of: Callable[..., Path], capfd: Any
) -> None:
    policy = load_spoilt(spoil)

    expected = load_file(folder_of("llama") / "model.safetensors")
    torch.testing.assert_close(policy.base_weights(), expected, rtol=0, atol=0)
    assert "%|" not in "".join(capfd.readouterr())  # no bar of transformers


NOT_LOADED = {
    "cut short": (truncated, r"model\.safetensors is damaged.*download it again"),
    "a pointer": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "a part missing": (sharded, r"model-2\.safetensors.*with all its files"),
    "an adapter": (text("adapter_config.json", "{}"), r"adapter_config\.json.*merge_and_unload"),
    "no tokenizer": (
        text("tokenizer.json", None),
        r"no tokenizer .*tokenizer\.json and tokenizer_config\.json",
    ),
    "a broken tokenizer": (text("tokenizer.json", "{"), r"no tokenizer .*Expecting.*beside it"),
    "no JSON": (text("config.json", "{"), r"no model .*config\.json"),
    "an unknown architecture": (config(model_type="grok9"), "no model .*grok9"),
    "code of its own": (
        config(model_type="mine", auto_map={"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}),
        r"model\.trust_remote_code = true",
    ),
    "an encoder-decoder": (text("config.json", '{"model_type": "t5"}'), "'t5' is not a decoder-only"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantised .gptq.*bfloat16"),
    "words without rows": (fewer_rows, "tokenizer has 61 tokens.*60 rows"),
}


@pytest.mark.parametrize("case", NOT_LOADED)
def test_a_model_that_cannot_be_loaded_says_what_is_wrong_and_what_to_do(
    case: str, load_spoilt: Callable[..., Policy]
) -> None:
    spoil, message = NOT_LOADED[case]

    with pytest.raises(ValueError, match=message) as caught:
        load_spoilt(spoil)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt", "gptj"])
def test_an_attention_that_cannot_be_replaced_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=f"'{family}' computes its attention by itself"):
        check_architecture(AutoConfig.for_model(family))


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
def test_a_sequence_longer_than_the_positions_is_refused_with_both_numbers(
    rope: dict[str, Any], positions: int, load: Callable[..., Policy]
) -> None:
    policy = load("llama")
    policy.base_model.config.rope_parameters = rope or policy.base_model.config.rope_parameters

    assert longest_sequence(policy, [[4, 5], [6] * 11], positions - 11) == positions
    with pytest.raises(ValueError, match=rf"need {positions + 1} positions.* has {positions} .*rope_scaling"):
        longest_sequence(policy, [[6] * 12, [4, 5]], positions - 11)


def test_a_token_beyond_the_embedding_is_refused_with_both_numbers(load: Callable[..., Policy]) -> None:
    policy = load("llama")

    assert longest_sequence(policy, [[60]]) == 1
    with pytest.raises(ValueError, match=r"token 61 .*61 rows"):
        longest_sequence(policy, [[3], [4, 61]])


def test_a_tensor_that_the_architecture_has_no_place_for_is_not_left_out_in_silence(
    load: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = load("llama")
    policy.base_model.register_parameter("own", torch.nn.Parameter(torch.zeros(2)))

    with pytest.raises(RuntimeError, match="no place for own"):
        policy.save_pretrained(tmp_path)
