"""What vLLM is started with: how it gets the policy's weights, how it sleeps, and the arguments of `LLM`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.data.images import INSTALL
from grpo_fast.policy.recurrent import recurrent_mixers
from grpo_fast.policy.vision import looks_both_ways, sees_images
from grpo_fast.rollout.engines import Trained
from grpo_fast.rollout.vllm import installed_version, version_problem
from grpo_fast.rollout.vllm.sleep import GIB
from grpo_fast.rollout.vllm.weights import has_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from grpo_fast.policy import Policy

CPU_KV_GIB = 1.0  # where nothing says how much
LOAD_FORMAT = "grpo_fast"
FP32_HEAD_SINCE = (0, 26)  # older ones warn, and generate with the model's own dtype
FREE_SHARE = 0.5  # of the free GPU memory, when nothing says how much vLLM may have
MOST_FREE = 0.97  # of it, where kv_cache_gib bounds vLLM's use: some more is taken before vLLM measures
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes


def keeps_adapters(config: VLLMConfig, trained: Trained) -> bool:
    """Whether LoRA is sent as an adapter. Merged, decoding needs no LoRA kernels, and any rank will do."""
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
    return "rollout.vllm.share_weights = false" if config.share_weights is False else None


def kv_cache_gib(config: VLLMConfig, on_gpu: bool) -> float | None:
    """GiB for keys and values where something says how many."""
    return config.kv_cache_gib or (None if on_gpu else CPU_KV_GIB)


@dataclass(frozen=True)
class Choices:
    """What policy and configuration say of weights and sleep before vLLM starts."""

    adapters: bool  # LoRA as an adapter
    obstacle: str | None  # to one copy of the weights for policy and vLLM, wherever the layout allows it
    level: Literal["auto", 0, 1, 2]  # of sleep; auto: by the way that the weights will take

    @property
    def shares(self) -> bool:
        return self.obstacle is None


def choose(policy: Policy, config: VLLMConfig) -> Choices:
    """Raises ValueError for a setting that this device or policy cannot have."""
    on_gpu, experts = policy.device.type == "cuda", has_experts(policy)
    trained = Trained(on_gpu, policy.has_adapters, policy.quantized, policy.sharded, experts=experts)
    adapters, obstacle = keeps_adapters(config, trained), sharing_obstacle(config, trained)
    refusals = [
        (
            config.lora_sync != "auto" and not policy.has_adapters,
            f"lora_sync = {config.lora_sync!r}, but the policy has no LoRA; leave it at auto",
        ),
        (
            config.lora_sync == "merged" and policy.quantized,
            "lora_sync = 'merged' adds LoRA to 4-bit weights, which do not hold the sum; leave it at auto",
        ),
        (
            adapters and policy.sharded,
            "lora_sync = 'adapter' needs whole adapters on each rank, and distributed.mode = 'shard' divides "
            "them; set lora_sync to merged, or mode to replicate",
        ),
        (
            adapters and config.sleep_level == 2,
            "sleep_level = 2 drops the base that lora_sync = 'adapter' never sends again; set it to 1"
            + ("" if policy.quantized else ", or lora_sync to merged"),
        ),
        (
            not on_gpu and config.sleep_level not in ("auto", 0),
            f"sleep_level = {config.sleep_level} needs a GPU: on {policy.device.type} vLLM keeps its memory; "
            "leave it at auto",
        ),
        (
            config.share_weights is True and obstacle is not None,
            f"share_weights = true: {obstacle}, or share_weights to auto",
        ),
    ]
    for applies, problem in refusals:
        if applies:
            raise ValueError(f"rollout.vllm.{problem}")
    if experts and not on_gpu:
        raise ValueError(
            "rollout.engine = 'vllm': on a CPU vLLM keeps the experts that it packed when it started, and "
            "misses every update; set it to transformers"
        )
    return Choices(adapters, obstacle, config.sleep_level if on_gpu else 0)


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


def require_positions(config: PreTrainedConfig, length: int) -> None:
    """Raises ValueError where `dynamic` rotary positions would stretch, which vLLM's do not."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if "dynamic" in kinds and length > config.max_position_embeddings:
        raise ValueError(
            f"sequences of up to {length} tokens need more than the model's {config.max_position_embeddings} "
            "positions, and vLLM does not stretch them by rope_type = dynamic: set rollout.engine to "
            "transformers, or lower dataset.max_prompt_length or rollout.max_completion_length"
        )


def engine_arguments(
    policy: Policy, config: VLLMConfig, adapters: bool, max_length: int | None
) -> dict[str, Any]:
    """What `LLM` is called with, besides model, memory and sleep.

    Raises ValueError for LoRA of a rank that vLLM does not take, or a float32 head that its version lacks.
    """
    on_cpu = policy.device.type == "cpu"
    arguments: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "dtype": str(policy.base_model.dtype).removeprefix("torch."),
        "seed": 0,  # requests bring their own
        "max_model_len": config.max_model_length or max_length or -1,  # -1: the model's, or what fits
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # its own neutral defaults, not the model's
        "disable_log_stats": True,
        "tensor_parallel_size": config.tensor_parallel_size,
        # It shares memory between processes that `expandable_segments` does not let it share.
        "disable_custom_all_reduce": config.tensor_parallel_size > 1,
    }
    if config.max_sequences is not None:
        sizes = graph_sizes(config.max_sequences)
        arguments |= {"max_num_seqs": config.max_sequences, "cudagraph_capture_sizes": sizes}
    if on_cpu:
        # After a part of a prompt vLLM turns its request's generator back, which a CPU's cannot be.
        arguments["enable_chunked_prefill"] = False
        # States of recurrent layers vLLM caches for parts of prompts alone.
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
                f"model.lora.r = {rank} exceeds the {LORA_RANKS[-1]} that vLLM takes; set lora_sync to merged"
            )
        allowed = next(allowed for allowed in LORA_RANKS if allowed >= rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": allowed}
    return arguments


def memory_arguments(config: VLLMConfig, device: torch.device, shared: int, share: float) -> dict[str, Any]:
    """Return the arguments of `LLM` for its memory, read where all is free that it may take.

    On a GPU vLLM measures the room for keys and values within its share of the device. vLLM refuses to start
    where that share, by default 92 %, is not free.

    Args:
        shared: bytes of the weights that vLLM builds and the policy then has too.
        share: of the room for keys and values; on a GPU `bounded_cache` applies it.
    """
    size = kv_cache_gib(config, device.type == "cuda")
    if device.type == "cpu":
        return {"kv_cache_memory_bytes": int(share * (size or 0) * GIB)}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    most = MOST_FREE * free if size else shared + FREE_SHARE * (free - shared)
    asked = config.gpu_memory_utilization or most / total
    return {"gpu_memory_utilization": min(asked, MOST_FREE * free / total) if share < 1 else asked}


def graph_sizes(largest: int) -> list[int]:
    """Batches that CUDA graphs are captured for. vLLM's own miss a `largest` that 8 does not divide."""
    step = 8 * math.ceil(largest / 256)
    return [*(size for size in (1, 2, 4, *range(step, largest, step)) if size < largest), largest]
