"""Tiny random models of any type that transformers builds, made from the configuration class alone.

Sizes shrink by their usual names. One layer of each kind stays: whatever a configuration lists for each layer
(mixers, MLPs, windows, rotary bases) is cut to the same few entries.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
import torch
from packaging.version import Version

from grpo_fast.policy.vision import auto_class

if TYPE_CHECKING:
    pass

_INSTALLED = Version(version("transformers"))
VOCABULARY = 128
LAYERS = 2  # where nothing is listed for each layer
MOST_PARAMETERS = 10_000_000
STD = 0.1  # of matrices; with larger ones a recurrent model's own forward is off by 1e-5 nats in float32
_NAMES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab ngram_vocab_size_base",
    512: "max_position_embeddings n_positions max_seq_len model_max_length context_length",
    64: "intermediate_size ffn_dim ffn_hidden_size n_inner feed_forward_size intermediate_size_mlp "
    "mamba_d_ssm",
    32: "hidden_size d_model n_embd word_embed_proj_dim lru_width emb_dim embedding_dim "
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size router_hidden_size hidden_size_global "
    "backbone_hidden_size ple_embed_dim",
    16: "kv_lora_rank q_lora_rank index_head_dim indexer_head_dim state_size mamba_d_state "
    "ssm_state_size adapter_rank hidden_size_per_layer_input dim_model_base index_n_heads "
    "indexer_n_heads hc_lowrank indexer_budget",
    8: "head_dim kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim index_topk time_step_rank "
    "query_pre_attn_scalar linear_head_dim mamba_n_heads mamba_num_heads attention_chunk_size "
    "chunk_size mamba_chunk_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts sliding_window attention_window_size window_size "
    "linear_num_value_heads linear_num_heads indexer_compress_ratio",
    2: "num_key_value_heads num_kv_heads kv_n_heads num_experts_per_tok num_experts_per_token moe_topk "
    "moe_top_k moe_k top_k_experts linear_num_key_heads mamba_expand zero_expert_num "
    "num_decoder_layers heads_per_ngram split_ngram_parts",
    1: "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
    "num_dense_layers mamba_n_groups n_groups mamba_ngroups num_expert_group indexer_kv_heads",
    0: "num_nextn_predict_layers num_kv_shared_layers",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
TOKENS = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 2}
EXCEPTIONS = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "jamba": {
        **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "phimoe": {"sliding_window": None},  # as published
    "qwen2_5_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the usual names do not say."""


def since(version):
    """Return a mark that skips what needs a newer transformers than the oldest of the range."""
    return pytest.mark.skipif(Version(version) > _INSTALLED, reason=f"needs transformers {version} or newer")


def require_family(kind):
    """Skip a test of a model that transformers 5.17 has, and an older one that is installed does not."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING and Version("5.17") > _INSTALLED:
        pytest.skip(f"transformers {_INSTALLED} has no {kind}")


def tiny_config(kind):
    """Return a configuration with few layers of each kind, hidden size 32 and 128 words."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    known = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    config = known.get(kind) or CONFIG_MAPPING[kind]
    return config(**changes(config()))


def changes(base):
    """Return what makes a default configuration, and those within it, small."""
    known = base.to_dict()
    sizes = {**SIZES, **TOKENS, "is_decoder": True}
    found = {
        name: size for name, size in sizes.items() if name in known and isinstance(known[name], int | None)
    }
    if "kv_lora_rank" in found:  # latent attention has keys and values for every head
        found["num_key_value_heads"] = found["num_attention_heads"]
    name = base.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if isinstance(count := known.get(name), int):
        listed = {
            key: [sizes[key]] * count if key in sizes else value
            for key, value in known.items()
            if isinstance(value, list) and len(value) == count and value != [*range(count)]
        }
        kept = _one_of_each([*zip(*listed.values(), strict=True)], count)
        found |= {key: [value[index] for index in kept] for key, value in listed.items()}
        found[name] = len(kept)
    for part in base.sub_configs:
        if getattr(base, part, None) is not None:
            found[part] = changes(getattr(base, part))
    return found | EXCEPTIONS.get(base.model_type, {})


def _one_of_each(kinds, count):
    """Return the first layer of each kind, and two layers at least."""
    first = {repr(kind): index for index, kind in reversed([*enumerate(kinds)])}
    kept = sorted(first.values())
    return kept if len(kept) >= LAYERS else [*range(min(LAYERS, count))]


def tiny_model(config, seed=0):
    """Build a float32 model whose every parameter is random: biases, sinks, decays and norms too.

    Raises:
        ValueError: the model is not tiny.
    """
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class(config).from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    model = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=STD)
            else:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model
