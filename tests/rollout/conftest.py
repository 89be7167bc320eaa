"""Tiny models and a tokenizer over letters."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # peaked enough that sampling has a shape to get wrong
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE, sliding_window=6, layer_types=["sliding_attention"] * 2 + ["full_attention"]
        )
    ),
}


@pytest.fixture
def seed() -> int:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def family_model(seed: int) -> Callable[[str], PreTrainedModel]:
    return lambda family: MAKERS[family]().eval()


@pytest.fixture
def model(family_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return family_model("llama")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 3 to 28 are the letters; 29 is two of them at once."""
    vocabulary = ["<bos>", "<eos>", "<pad>", *string.ascii_lowercase, "xy"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
