"""Settings of vLLM's start: the path of the weights, the sleep level, and the arguments of `LLM`."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.data.images import INSTALL
from grpo_fast.policy.recurrent import recurrent_mixers
from grpo_fast.policy.vision import looks_both_ways, sees_images
from grpo_fast.rollout.engines import Trained, Weights
from grpo_fast.rollout.vllm import installed_version, version_problem
from grpo_fast.rollout.vllm.sleep import GIB
from grpo_fast.rollout.vllm.weights import has_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpo_fast.policy import Policy

CPU_KV_GIB = 1.0  # unless configured
LOAD_FORMAT = "grpo_fast"
FP32_HEAD_SINCE = (0, 26)  # older versions only warn
FREE_SHARE = 0.5  # of the free GPU memory, unless configured
MOST_FREE = 0.97  # of it, where kv_cache_gib bounds vLLM: other memory is allocated before vLLM measures
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # allowed by vLLM


def weights_of(config: VLLMConfig, trained: Trained) -> Weights:
    """Return how vLLM gets its weights. Merged LoRA needs no LoRA kernels, and allows any rank."""
    adapters = config.lora_sync == "adapter" or (trained.quantized and config.lora_sync == "auto")
    adapters, obstacle = adapters and trained.adapted, None
    if trained.sharded:
        obstacle = "distributed.mode = 'shard' divides the weights; set it to replicate"
    elif config.tensor_parallel_size > 1:
        obstacle = f"tensor_parallel_size = {config.tensor_parallel_size} gives each process a slice"
    elif trained.adapted and not adapters:
        obstacle = "merged LoRA weights are not the policy's; set lora_sync to adapter"
    elif trained.experts:
        # Sleep would not free vLLM's experts, since sharing keeps the model out of its pool.
        obstacle = "vLLM lays out experts differently; set share_weights to false"
    elif config.share_weights is False:
        obstacle = "rollout.vllm.share_weights = false"
    return Weights(obstacle, adapters)


def kv_cache_gib(config: VLLMConfig, on_gpu: bool) -> float | None:
    """Return the configured or default GiB of the KV cache; None: vLLM measures."""
    return config.kv_cache_gib or (None if on_gpu else CPU_KV_GIB)


def choose(policy: Policy, config: VLLMConfig) -> Weights:
    """Return how vLLM gets its weights. Raises ValueError for a setting that contradicts device or policy."""
    on_gpu, experts = policy.device.type == "cuda", has_experts(policy)
    weights = weights_of(config, Trained(policy.has_adapters, policy.quantized, policy.sharded, experts))
    refusals = [
        (
            config.lora_sync != "auto" and not policy.has_adapters,
            f"lora_sync = {config.lora_sync!r}, but the policy has no LoRA; leave it at auto",
        ),
        (
            config.lora_sync == "merged" and policy.quantized,
            "lora_sync = 'merged' cannot add LoRA to 4-bit weights; leave it at auto",
        ),
        (
            weights.adapters and policy.sharded,
            "lora_sync = 'adapter' needs whole adapters, which distributed.mode = 'shard' divides; set "
            "lora_sync to merged, or mode to replicate",
        ),
        (
            weights.adapters and config.sleep_level == 2,
            "sleep_level = 2 drops the base, which lora_sync = 'adapter' sends only once; set it to 1"
            + ("" if policy.quantized else ", or lora_sync to merged"),
        ),
        (
            not on_gpu and config.sleep_level not in ("auto", 0),
            f"sleep_level = {config.sleep_level} needs a GPU; leave it at auto",
        ),
        (
            config.share_weights is True and not weights.shared,
            f"share_weights = true: {weights.obstacle}, or share_weights to auto",
        ),
    ]
    for applies, problem in refusals:
        if applies:
            raise ValueError(f"rollout.vllm.{problem}")
    if experts and not on_gpu:
        raise ValueError(
            "rollout.engine = 'vllm': on a CPU vLLM packs experts at its start and misses every update; set "
            "it to transformers"
        )
    return weights


def require_vision(architecture: PreTrainedConfig, *, on_gpu: bool, images: bool) -> None:
    """Check that vLLM can compute a vision model.

    Raises:
        ImportError: torchvision is missing.
        ValueError: prompts have images, which vLLM would compute differently from the policy.
    """
    kind = architecture.model_type
    if sees_images(architecture) and find_spec("torchvision") is None:
        raise ImportError(
            f"vLLM needs torchvision for models of type {kind}, with images or without: {INSTALL}; or set "
            "rollout.engine to transformers"
        )
    if images and not on_gpu and looks_both_ways(architecture):
        raise ValueError(
            f"on a CPU vLLM attends causally within images, and {kind} in both directions: set "
            "rollout.engine to transformers"
        )


def require_positions(config: PreTrainedConfig, length: int) -> None:
    """Raise ValueError if `dynamic` rotary positions would be stretched, which vLLM does not do."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if "dynamic" in kinds and length > config.max_position_embeddings:
        raise ValueError(
            f"sequences of up to {length} tokens need more than the model's {config.max_position_embeddings} "
            "positions, and vLLM ignores rope_type = dynamic: set rollout.engine to transformers, or lower "
            "dataset.max_prompt_length or rollout.max_completion_length"
        )


def engine_arguments(
    policy: Policy, config: VLLMConfig, adapters: bool, max_length: int | None
) -> dict[str, Any]:
    """Return the arguments of `LLM`, besides model, memory and sleep.

    Raises:
        ValueError: vLLM does not support the LoRA rank, or its version no float32 head.
    """
    on_cpu = policy.device.type == "cpu"
    arguments: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "dtype": str(policy.base_model.dtype).removeprefix("torch."),
        "seed": 0,  # requests have seeds
        "max_model_len": config.max_model_length or max_length or -1,  # -1: the model's, or what fits
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # neutral defaults instead of the model's
        "disable_log_stats": True,
        "tensor_parallel_size": config.tensor_parallel_size,
        # Incompatible with `expandable_segments`.
        "disable_custom_all_reduce": config.tensor_parallel_size > 1,
    }
    if config.max_sequences is not None:
        sizes = graph_sizes(config.max_sequences)
        arguments |= {"max_num_seqs": config.max_sequences, "cudagraph_capture_sizes": sizes}
    if on_cpu:
        # After a chunk vLLM rewinds the request's generator, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
        # For recurrent layers it needs chunked prefill.
        arguments["enable_prefix_caching"] = not recurrent_mixers(policy.base_model)
    if config.fp32_head:
        if problem := version_problem(installed_version(), FP32_HEAD_SINCE):
            raise ValueError(f"rollout.vllm.fp32_head = true: {problem}; or leave it out")
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if adapters:
        loras: dict[str, Any] = policy.model.peft_config
        rank = max(lora.r for lora in loras.values())
        if rank > LORA_RANKS[-1]:
            raise ValueError(
                f"model.lora.r = {rank}: vLLM allows at most {LORA_RANKS[-1]}; set lora_sync to merged"
            )
        allowed = next(allowed for allowed in LORA_RANKS if allowed >= rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": allowed}
    return arguments


def memory_arguments(config: VLLMConfig, device: torch.device, shared: int, share: float) -> dict[str, Any]:
    """Return the arguments of `LLM` for its memory, from the memory that is free now.

    On a GPU vLLM measures the room for its KV cache within its share of the device, and refuses to start if
    that share, by default 92 %, is not free.

    Args:
        shared: bytes of the weights that vLLM builds and shares with the policy.
        share: of the room for the KV cache, below 1 in a second start; on a GPU `bounded_cache` applies it.
    """
    size = kv_cache_gib(config, device.type == "cuda")
    if device.type == "cpu":
        return {"kv_cache_memory_bytes": int(share * (size or 0) * GIB)}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    most = MOST_FREE * free if size else shared + FREE_SHARE * (free - shared)
    utilization = config.gpu_memory_utilization or most / total
    if share < 1:
        utilization = min(utilization, MOST_FREE * free / total)
    return {"gpu_memory_utilization": utilization}


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes of CUDA graphs; vLLM's default misses a `largest` not divisible by 8."""
    step = 8 * math.ceil(largest / 256)
    return [*(size for size in (1, 2, 4, *range(step, largest, step)) if size < largest), largest]
