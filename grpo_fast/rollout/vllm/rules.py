"""What vLLM starts with, as the plan and the start both ask it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.data.images import INSTALL
from grpo_fast.policy.vision import looks_both_ways, sees_images
from grpo_fast.rollout.engines import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CPU_KV_GIB = 1.0  # where nothing says how much


def keeps_adapters(config: VLLMConfig, trained: Trained) -> bool:
    """LoRA as an adapter; merged, decoding needs no LoRA kernels, and any rank will do."""
    return config.lora_sync == "adapter" or (trained.quantized and config.lora_sync == "auto")


def sharing_obstacle(config: VLLMConfig, trained: Trained) -> str | None:
    """Why policy and vLLM cannot have one copy of the weights; None: they can where the layout allows it."""
    if trained.sharded:
        return "distributed.mode = 'shard' leaves no rank a whole weight; set it to replicate"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size = {config.tensor_parallel_size} gives each process a slice"
    if trained.adapted and not keeps_adapters(config, trained):
        return "merged LoRA weights are not the policy's own; set lora_sync to adapter"
    if trained.experts:
        # They would stay beside the trainer's: sharing takes the model out of what vLLM's sleep frees.
        return "vLLM lays out experts in its own way; leave them to its sleep"
    if config.share_weights is False:
        return "rollout.vllm.share_weights = false"
    if config.share_weights == "auto" and not (trained.on_gpu or trained.quantized):
        return "a CPU packs its weights"
    return None


def require_vision(architecture: PreTrainedConfig, *, on_gpu: bool, images: bool) -> None:
    """Raises ImportError where vLLM lacks what it needs for a model that sees images, and ValueError where it
    would compute `images` otherwise than the policy."""
    kind = architecture.model_type
    if sees_images(architecture) and find_spec("torchvision") is None:
        raise ImportError(
            f"vLLM needs torchvision for models of type {kind}, with images or without: {INSTALL}; or set "
            "rollout.engine to transformers"
        )
    if images and not on_gpu and looks_both_ways(architecture):
        raise ValueError(
            f"on a CPU vLLM lets tokens of an image see only what is before them, and {kind} all of it: set "
            "rollout.engine to transformers"
        )


def kv_cache_gib(config: VLLMConfig, on_gpu: bool) -> float | None:
    """GiB for keys and values where something says how many."""
    return config.kv_cache_gib or (None if on_gpu else CPU_KV_GIB)
