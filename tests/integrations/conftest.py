"""What the adapters' tests share: small models, padded batches, examples."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_fast import examples

sys.path.insert(0, str(Path(__file__).parent))  # for `host_stubs`, which the two ranks import by its name too


@pytest.fixture
def small_model() -> Callable[..., PreTrainedModel]:
    def make(family: str = "llama", **options: Any) -> PreTrainedModel:
        sizes = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
        sizes |= {"bos_token_id": 1, "eos_token_id": 1}
        config = AutoConfig.for_model(family, **sizes | options)
        return AutoModelForCausalLM.from_config(config).eval()

    return make


@pytest.fixture
def padded(rng: torch.Generator) -> SimpleNamespace:
    """A host's (4, 9) float64 batch, one sequence empty: `new` is a leaf, masked entries are finite."""

    def noise() -> Tensor:
        return 0.5 * torch.randn(4, 9, generator=rng, dtype=torch.float64)

    old = -torch.rand(4, 9, generator=rng, dtype=torch.float64) * 3
    advantages = torch.randn(4, 1, generator=rng, dtype=torch.float64).expand(4, 9).contiguous()
    mask = torch.arange(9) < torch.tensor([[9], [4], [0], [6]])
    return SimpleNamespace(
        old=old, new=(old + noise()).requires_grad_(), sampler=old + noise(), advantages=advantages, mask=mask
    )


@pytest.fixture
def run_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Runs one of `grpo_fast.examples` as it stands: its names, and what it printed."""

    def run(name: str) -> tuple[dict[str, Any], str]:
        monkeypatch.chdir(tmp_path)
        return runpy.run_path(f"{examples.__path__[0]}/{name}.py"), capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, for TRL's trainers."""
    from words import save_words

    folder = tmp_path_factory.mktemp("tiny")
    save_words(folder)
    return folder


@pytest.fixture(autouse=True)
def no_host_stays_patched() -> Iterator[None]:
    """But verl, which is patched by an import."""
    yield
    for host in ("trl.patch", "openrlhf", "prime_rl", "nemo_rl", "skyrl", "slime", "unsloth"):
        if adapter := sys.modules.get(f"grpo_fast.integrations.{host}"):
            adapter.unpatch()
