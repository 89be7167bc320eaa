"""A tiny random model of any type that transformers builds, made from its configuration class alone.

Sizes shrink by their usual names. Of the layers one of each kind stays: whatever a configuration lists for
each layer (kinds of mixers and MLPs, windows, rotary bases) is cut to the same few.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.policy.vision import IMAGE_TYPES, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 128
LAYERS = 2  # where nothing is listed for each
MOST_PARAMETERS = 10_000_000
STD = 0.1  # of matrices: larger, and a recurrent model's own forward is 1e-5 nat off in float32
_NAMES: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input vocab_offset pronunciation_vocab_size "
    "shape_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    512: "max_position_embeddings n_positions max_seq_len model_max_length n_ctx context_length",
    64: "intermediate_size ffn_dim ffn_hidden_size n_inner dff decoder_ffn_dim encoder_ffn_dim dim_ff "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size "
    "mlp_hidden_size mamba_d_ssm d_inner",
    32: "hidden_size d_model n_embd word_embed_proj_dim lru_width embedding_size embed_dim emb_dim "
    "embedding_dim moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size router_hidden_size hidden_size_global "
    "input_embedding_size backbone_hidden_size ple_embed_dim",
    16: "kv_lora_rank q_lora_rank o_lora_rank index_head_dim indexer_head_dim state_size mamba_d_state "
    "ssm_state_size adapter_rank hidden_size_per_layer_input laurel_rank dim_model_base gated_norm_rank "
    "index_n_heads indexer_n_heads hc_lowrank shape_embed_dim pronunciation_embed_dim indexer_budget "
    "output_embedding_size",
    8: "head_dim global_head_dim swa_head_dim kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim index_topk "
    "time_step_rank query_pre_attn_scalar rotary_dim dim_head d_head linear_head_dim mamba_n_heads "
    "mamba_num_heads attention_chunk_size index_block_size chunk_size mamba_chunk_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "attention_heads swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts sliding_window sliding_window_size "
    "attention_window_size window_size linear_num_value_heads linear_num_heads indexer_compress_ratio",
    2: "num_key_value_heads num_global_key_value_heads swa_num_key_value_heads n_head_kv num_kv_heads "
    "kv_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts "
    "linear_num_key_heads mamba_expand zero_expert_num decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers heads_per_ngram index_topk_blocks "
    "split_ngram_parts",
    1: "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
    "num_dense_layers mamba_n_groups n_groups mamba_ngroups num_expert_group indexer_kv_heads",
    0: "num_nextn_predict_layers num_kv_shared_layers",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "index_n_heads", "indexer_n_heads")
_WIDE = {name: 4 * size if 8 <= size < 128 and name not in _HEADS else size for name, size in SIZES.items()}
_WIDE |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""For vLLM's kernels on a CPU: heads of at least 32, and the one size of latents that there is code for."""
TOKENS = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_WINDOWED = ["sliding_attention", "full_attention"]
_DRAFTED = {
    "text_config": {
        "model_type": "gemma4_text",
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    }
}
_SUNG = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
PARTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], _DRAFTED),
    **dict.fromkeys(["musicgen", "musicgen_melody"], _SUNG),
}
"""Of several models, none of which reads text by itself: without their parts there is no configuration."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": _WINDOWED,
        "rope_parameters": {kind: dict(_ROPE, mrope_section=[2, 1, 1]) for kind in _WINDOWED},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "jamba": {
        **{"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        **{"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "index_n_heads": 2,
    },
    "phimoe": {"sliding_window": None},  # as published
    "qwen2_5_vl_text": {"rope_parameters": dict(_ROPE, mrope_section=[2, 1, 1])},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the usual names do not say."""


def kinds() -> list[str]:
    """The types of the installed transformers that are causal, and those that see images, each once."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    causal = (config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING)
    return list(dict.fromkeys([*causal, *sorted(IMAGE_TYPES)]))


def tiny_config(kind: str, *, wide: bool = False) -> PreTrainedConfig:
    """Few layers of each kind, hidden size 32, or `wide` 128, and 128 words; of `PARTS` the usual sizes.

    Raises:
        Exception: whatever the class says where the usual sizes do not suit it.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    known = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    config: Any = known.get(kind) or CONFIG_MAPPING[kind]
    if kind in PARTS:
        return config(**copy.deepcopy(PARTS[kind]))
    return config(**_changes(config(), _WIDE if wide else SIZES))


def _changes(base: PreTrainedConfig, usual: dict[str, int]) -> dict[str, Any]:
    """What makes a default configuration, and those within it, small."""
    known = base.to_dict()
    sizes = {**usual, **TOKENS, "is_decoder": True}
    changes = {
        name: size for name, size in sizes.items() if name in known and isinstance(known[name], int | None)
    }
    if "kv_lora_rank" in changes:  # latent attention has keys and values for every head
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    name = base.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if isinstance(count := known.get(name), int):
        listed = {
            key: [sizes[key]] * count if key in sizes else value
            for key, value in known.items()
            if isinstance(value, list) and len(value) == count and value != [*range(count)]
        }
        kept = _one_of_each([*zip(*listed.values(), strict=True)], count)
        changes |= {key: [value[index] for index in kept] for key, value in listed.items()}
        changes[name] = len(kept)
    for part in base.sub_configs:
        if getattr(base, part, None) is not None:
            changes[part] = _changes(getattr(base, part), usual)
    return changes | EXCEPTIONS.get(base.model_type, {})


def _one_of_each(kinds: list[tuple[Any, ...]], count: int) -> list[int]:
    """The first layer of each kind, and two at least."""
    first = {repr(kind): index for index, kind in reversed([*enumerate(kinds)])}
    kept = sorted(first.values())
    return kept if len(kept) >= LAYERS else [*range(min(LAYERS, count))]


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """In float32 and every number random: biases, sinks, decays and norms as well as matrices.

    Raises:
        ValueError: it is not tiny.
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
