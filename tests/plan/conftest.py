"""Small models of several families, and predictions of training them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from grpo_fast.config.schema import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import Shapes
from grpo_fast.plan.prediction import Predictor

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
    "gemma4_text": {  # heads of two widths
        **{"head_dim": 32, "global_head_dim": 64, "sliding_window": 8, "hidden_size_per_layer_input": 16},
        **{"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "num_global_key_value_heads": 1},
        **{"vocab_size_per_layer_input": 1000, "num_kv_shared_layers": 0},
    },
    "gpt_neox": {},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "granite_swa": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "deepseek_v3": {
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        **{"v_head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_group": 1},
        **{"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "bloom": {"n_layer": 3, "n_head": 4},
    "ernie4_5_moe": {"moe_intermediate_size": 32, "head_dim": 32},
    "gpt_oss": {"head_dim": 32},
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


@pytest.fixture(scope="session")
def config() -> Callable[..., PretrainedConfig]:
    """`config("llama", num_hidden_layers=1)`: a small configuration of that family."""

    def small(family: str = "qwen2", **changes: Any) -> PretrainedConfig:
        return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})

    return small


@pytest.fixture(scope="session")
def predictor() -> Callable[..., Predictor]:
    """`predictor(config, dtype="bfloat16")`: of a model trained on a CPU, or of its shapes.

    The keywords are keys of `model`; `sections` are others of the run's.
    """

    def make(
        model: PretrainedConfig | Shapes,
        device: DeviceBudget = CPU,
        sections: dict[str, Any] | None = None,
        **keys: Any,
    ) -> Predictor:
        anything = {"dataset": {"source": "-"}, "rewards": [{"reward": "length"}]}
        keys = {"path": "-", "dtype": "float32"} | keys
        run = TrainConfig.model_validate({"model": keys, **anything, **(sections or {})})
        shapes = model if isinstance(model, Shapes) else Shapes(model)
        return Predictor(run, shapes, device)

    return make
