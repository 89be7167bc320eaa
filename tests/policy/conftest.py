"""Tiny random models of several families, and samples to run through them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from grpo_fast.policy import PackedBatch, Policy, load_policy, pack
from grpo_fast.policy.config import ModelConfig
from grpo_fast.table import Completions

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    # One sliding layer, one full; both softcaps.
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    # Heads of two widths, experts beside the MLP, and a layer that takes the keys of the one before.
    "gemma4_text": {
        **{"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 4},
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61},
    },
    # Attention sinks: of every layer with experts, of every layer, of those with a window.
    "gpt_oss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "mimo_v2_flash": {
        **{"head_dim": 12, "v_head_dim": 8, "swa_num_key_value_heads": 4, "sliding_window": 4},
        **{"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]},
    },
    "qwen3_5_text": {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    },
    "bert": {"is_decoder": True},  # whose head reads what a layer of its own makes
    "camembert": {"is_decoder": True},  # whose head, tied to the embedding, comes first
    "modernbert-decoder": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "gpt2": {"n_inner": 48},
    "rwkv": {"num_hidden_layers": 7, "attention_hidden_size": 32},  # which rescales from the sixth layer on
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8},
    "cohere": {"logit_scale": 0.25},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.3},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "phimoe": {"num_local_experts": 4, "input_jitter_noise": 0.3},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4, "embedding_multiplier": 2.0},
}


def save_model(folder: Path, family: str = "llama", **changes: object) -> Path:
    """A random model with a word tokenizer, saved as a user would have it on disk."""
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # small random weights barely move the logits
        if parameter.ndim >= 2 and "layers" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.generation_config.eos_token_id = [2, 3]
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


def make_samples(
    rng: torch.Generator, groups: int = 4, generations: int = 3, prompt: int = 9, completion: int = 6
) -> Completions:
    """Prompts of 1 to `prompt` tokens, the first the longest; completions of 1 to `completion`; shuffled."""

    def integers(high: int, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, high, (count,), generator=rng).tolist())

    rows = []
    for group in range(groups):
        prompt_ids = integers(VOCABULARY, 1 + integers(prompt, 1)[0] if group else prompt)
        for _ in range(generations):
            length = 1 + integers(completion, 1)[0]
            rows.append((prompt_ids, integers(VOCABULARY, length), group))
    table = Completions.of(*zip(*rows, strict=True))
    advantages, logprobs = torch.randn(2, len(table.token_ids), generator=rng)
    table = table.with_columns(advantages=advantages, sampler_logprobs=logprobs)
    return table.select(torch.randperm(len(rows), generator=rng))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder_of("gemma2")`: a saved random model of that family, made once."""

    @cache
    def folder(family: str, **changes: object) -> Path:
        return save_model(tmp_path_factory.mktemp(family), family, **changes)

    return folder


@pytest.fixture(scope="session")
def load(folder_of: Callable[..., Path]) -> Callable[..., Policy]:
    """`load("llama", dtype="bfloat16")`: a policy of that family, in float32 unless said otherwise."""

    def load(family: str = "llama", *, needs_reference: bool = False, **settings: object) -> Policy:
        settings = {"path": str(folder_of(family)), "dtype": "float32", "device": "cpu", **settings}
        return load_policy(ModelConfig(**settings), needs_reference=needs_reference)

    return load


@pytest.fixture
def samples(rng: torch.Generator) -> Completions:
    return make_samples(rng)


@pytest.fixture
def batch(samples: Completions) -> PackedBatch:
    (batch,) = pack(samples, max_tokens=10_000, device="cpu")
    return batch
