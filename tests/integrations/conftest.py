"""What the adapters' tests share: their host, small models, padded batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))  # for `host_stubs`, which the two ranks import by its name too
from host_stubs import loaded


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The host that the file of tests is named after, as `loaded` yields it."""
    with loaded(request.module.__name__.rpartition("test_")[2]) as host:
        yield host


@pytest.fixture(autouse=True)
def no_host_stays_patched() -> Iterator[None]:
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("grpo_fast.integrations.") and hasattr(module, "unpatch"):
            module.unpatch()


@pytest.fixture
def small_model() -> Callable[..., PreTrainedModel]:
    """Make a model of 53 words; `gemma2` caps its logits."""

    def make(family: str = "llama", **options: Any) -> PreTrainedModel:
        sizes = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
        sizes |= {"bos_token_id": 1, "eos_token_id": 1}
        if family == "gemma2":
            sizes |= {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | options)).eval()

    return make


@pytest.fixture
def padded(rng: torch.Generator) -> SimpleNamespace:
    """A host's (4, 9) float64 batch, one sequence empty: `new` is a leaf, masked entries are finite."""

    def noise() -> Tensor:
        return 0.5 * torch.randn(4, 9, generator=rng, dtype=torch.float64)

    old = -torch.rand(4, 9, generator=rng, dtype=torch.float64) * 3
    advantages = torch.randn(4, 1, generator=rng, dtype=torch.float64).expand(4, 9).contiguous()
    mask = torch.arange(9) < torch.tensor([[9], [4], [0], [6]])
    new = (old + noise()).requires_grad_()
    return SimpleNamespace(old=old, new=new, sampler=old + noise(), advantages=advantages, mask=mask)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, for TRL's trainers."""
    from words import save_words

    folder = tmp_path_factory.mktemp("tiny")
    save_words(folder)
    return folder
