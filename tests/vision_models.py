"""Tiny random models that see images, each with its tokenizer and its processor, and random pictures."""

from __future__ import annotations

import copy

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

START, IMAGE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", START, END, IMAGE, "<|video_pad|>", "<|audio_pad|>"]
NEWLINES = ["\n" * count for count in range(1, 5)]  # which vLLM asks Gemma's tokenizer for
WORDS = ["user", "assistant", "system", "how", "many", "shapes", "one", "two", "three", "[UNK]"]
IMAGE_ID = SPECIAL.index(IMAGE)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
INTERLEAVED = {**ROPE, "mrope_interleaved": True}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
QWEN_IDS = {
    **{"image_token_id": IMAGE_ID, "video_token_id": IMAGE_ID + 1},
    **{"vision_start_token_id": IMAGE_ID - 2, "vision_end_token_id": IMAGE_ID - 1},
}
GEMMA_TEXT = {**TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
HYBRID_TEXT = {  # a recurrent layer, and one of attention
    **TEXT,
    **{"rope_parameters": {**INTERLEAVED, "partial_rotary_factor": 1.0}},
    **{"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
GEMMA_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def of_qwen(text, **tower):
    return {
        "text_config": text,
        "vision_config": {**TOWER, "num_position_embeddings": 64, **tower},
        **QWEN_IDS,
    }


CONFIGS = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    },
    "qwen3_vl": of_qwen({**TEXT, "rope_parameters": INTERLEAVED}, deepstack_visual_indexes=[0, 1]),
    "qwen3_vl_moe": of_qwen(
        {**TEXT, **EXPERTS, "rope_parameters": INTERLEAVED}, deepstack_visual_indexes=[0]
    ),
    "qwen3_5": of_qwen(HYBRID_TEXT),
    "qwen3_5_moe": of_qwen({**HYBRID_TEXT, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "gemma3": {
        "text_config": {**GEMMA_TEXT, "query_pre_attn_scalar": 8},
        "vision_config": {**GEMMA_TOWER, "image_size": 56, "patch_size": 14},
        **{"mm_tokens_per_image": 4, "image_token_index": IMAGE_ID, "image_token_id": IMAGE_ID},
        **{"boi_token_index": IMAGE_ID - 2, "eoi_token_index": IMAGE_ID - 1},
    },
    "gemma4": {
        "text_config": {
            **{**GEMMA_TEXT, "global_head_dim": 16, "num_global_key_value_heads": 1},
            **{"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        },
        "vision_config": {
            **{**GEMMA_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8},
            **{"pooling_kernel_size": 2, "position_embedding_size": 64, "default_output_length": 70},
        },
        "audio_config": None,
        **{"image_token_id": IMAGE_ID, "video_token_id": IMAGE_ID + 1, "audio_token_id": IMAGE_ID + 2},
        **{"boi_token_id": IMAGE_ID - 2, "eoi_token_id": IMAGE_ID - 1},
    },
}


def save_vision_model(folder, kind, **text):
    """A random model of a type, saved as a user would have it on disk; `text` is of Qwen's language model."""
    settings = copy.deepcopy(CONFIGS[kind])
    if text:
        settings["text_config"] |= text
        if "rope_parameters" in settings["text_config"]:
            settings["text_config"]["rope_parameters"]["mrope_section"] = [8, 4, 4]
        settings["vision_config"]["out_hidden_size"] = text["hidden_size"]
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings))
    for name, parameter in model.named_parameters():  # small random weights barely move the logits
        if parameter.ndim >= 2:  # large ones make the rounding of states and experts large
            large = "linear_attn" not in name and "experts" not in name
            torch.nn.init.normal_(parameter, std=0.2 if large else 0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    if kind == "gemma3":  # whose files have names of their own
        weights = load_file(folder / "model.safetensors")
        named = {
            name.replace("vision_tower.", "vision_tower.vision_model."): weights[name] for name in weights
        }
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS + NEWLINES)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(SPECIAL)
    named = {"boi_token": START, "eoi_token": END, "image_token": IMAGE}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named if kind.startswith("gemma") else {},
    )
    placeholder = {"gemma3": START, "gemma4": IMAGE}.get(kind, START + IMAGE + END)
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", placeholder)
    tokenizer.save_pretrained(folder)
    processor_of(kind).save_pretrained(folder)
    if kind == "gemma3":
        (folder / "processor_config.json").write_text(
            '{"image_seq_length": 4, "processor_class": "Gemma3Processor"}'
        )
    return folder


def processor_of(kind):
    """Of a type's images."""
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    if kind == "gemma4":
        return Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
    patch = 14 if kind == "qwen2_5_vl" else 16
    side = 2 * patch
    return Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=side**2, max_pixels=9 * side**2)


class OfGemma4:
    """What transformers' own does, which it cannot be imported for without torchvision."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text, images, **settings):
        pixels = processor_of("gemma4")(images[0], return_tensors="pt")
        for count in pixels.pop("num_soft_tokens_per_image"):
            text = [text[0].replace(IMAGE, START + "<SOFT>" * int(count) + END, 1)]
        tokens = self.tokenizer(text[0].replace("<SOFT>", IMAGE), return_tensors="pt")
        kinds = (tokens["input_ids"] == IMAGE_ID).long()
        return {"input_ids": tokens["input_ids"], "mm_token_type_ids": kinds, **pixels}


def picture(width, height):
    """Random colours."""
    seed = int(torch.randint(2**31, ()))
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
