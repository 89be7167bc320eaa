"""Small models of several families, and runs that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.memory import Setup
from grpo_fast.plan.model_shape import ModelShape, model_shape

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
    "deepseek_v3": {
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        **{"v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_group": 1},
        **{"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    },
    "ernie4_5_moe": {"moe_intermediate_size": 32, "head_dim": 32},
    "mixtral": {"head_dim": 32},
    "minicpm3": {
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
        **{"v_head_dim": 24, "num_key_value_heads": 4},
    },
    "qwen3_5_text": {
        **{"layer_types": ["linear_attention"] + ["full_attention"] * 2, "head_dim": 32},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "falcon_h1": {  # each layer attends and recurs
        **{"head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
        **{"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
}
CPU = DeviceBudget("cpu", name="cpu", total=8 << 30)
ANY = {"dataset": {"source": "any.jsonl", "max_prompt_length": 64}, "rewards": [{"reward": "length"}]}


@pytest.fixture(scope="session")
def config() -> Callable[..., PretrainedConfig]:
    """`config("llama", num_hidden_layers=1)`: a small configuration of that family."""

    def small(family: str = "qwen2", **changes: Any) -> PretrainedConfig:
        return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})

    return small


@pytest.fixture(scope="session")
def run() -> Callable[..., TrainConfig]:
    """`run(8, memory={...})`: groups of 8 completions in bfloat16, and other sections."""

    def make(num_generations: int = 8, **sections: Any) -> TrainConfig:
        rollout = {"num_generations": num_generations, "max_completion_length": 64}
        rollout |= sections.pop("rollout", {})
        model = {"path": "-", "dtype": "bfloat16"} | sections.pop("model", {})
        return TrainConfig.model_validate({**ANY, "model": model, "rollout": rollout, **sections})

    return make


@pytest.fixture(scope="session")
def setup(run: Any) -> Callable[..., Setup]:
    """`setup(model, device, loss={...})`: a run that trains a model, or its shape, on a device."""

    def make(of: PretrainedConfig | ModelShape, device: DeviceBudget = CPU, **sections: Any) -> Setup:
        made = run(**sections)
        shape = of if isinstance(of, ModelShape) else model_shape(of, made.model)
        return Setup(made, shape, device)

    return make
