"""Small models of several families, and setups to plan them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.setup import Setup
from grpo_fast.policy.config import ModelConfig

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gpt_neox": {},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
}
CPU = DeviceBudget("cpu", "cpu", 8 << 30)


@pytest.fixture(scope="session")
def config() -> Callable[..., PretrainedConfig]:
    """`config("llama", num_hidden_layers=1)`: a small configuration of that family."""

    def small(family: str = "qwen2", **changes: Any) -> PretrainedConfig:
        return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})

    return small


@pytest.fixture(scope="session")
def setup() -> Callable[..., Setup]:
    """`setup(config, dtype="bfloat16")`: trained on a CPU, which also generates."""

    def on_cpu(config: PretrainedConfig, **model: Any) -> Setup:
        return Setup(
            config=config,
            model=ModelConfig(path="-", **{"dtype": "float32", **model}),
            device=CPU,
            attention="sdpa",
            engine="transformers",
            shares_weights=True,
            sleeps=False,
            offload=(),
        )

    return on_cpu
