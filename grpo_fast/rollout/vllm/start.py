"""From a policy to a running vLLM: a folder with its configuration, its weights straight from memory."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_fast.policy.gguf import cache_folder
from grpo_fast.rollout.vllm.config import VLLMConfig
from grpo_fast.rollout.vllm.layout import Landing, share, size_in_bytes, storage_of, watch_loading
from grpo_fast.rollout.vllm.memory import GIB, require_empty_pool, weights_outside_the_pool
from grpo_fast.rollout.vllm.process import require_vllm, starting
from grpo_fast.rollout.vllm.sync import base_parameters, base_weights, checkpoint_weights
from grpo_fast.rollout.vllm.version import installed_version, require_version

if TYPE_CHECKING:
    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
LOAD_FORMAT = "grpo_fast"
CPU_KV_GIB = 1.0
FP32_HEAD_SINCE = (0, 26)  # older ones warn, and generate with the model's own dtype
FREE_SHARE = 0.5  # of the free GPU memory, when nothing says how much vLLM may have


@dataclass
class Started:
    """A running vLLM and what was seen while it loaded."""

    llm: Any
    landings: list[Landing]
    weight_bytes: int  # as loaded, in memory of vLLM's own
    weights_sleep: bool  # that memory is given away too, not the KV cache alone

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def worker(self) -> Any:
        return self.engine.model_executor.driver_worker.worker

    @property
    def model(self) -> nn.Module:
        return self.worker.get_model()


def start(
    policy: Policy,
    config: VLLMConfig,
    *,
    max_length: int | None = None,
    kv_cache_bytes: int | None = None,
    adapters: bool = False,
    sleeps: bool = False,
    shares: bool = False,
) -> Started:
    """Start vLLM in this process with the policy's weights. Nothing is read from disk, and none are random.

    Args:
        max_length: tokens of the longest prompt and its completion, unless the configuration says.
        kv_cache_bytes: planned for keys and values, unless the configuration says.
        adapters: load the base alone and be ready for a LoRA adapter.
        sleeps: put weights and KV cache into memory that can be given away.
        shares: let policy and vLLM use one copy of the weights wherever the layout allows it.

    Raises:
        ImportError: vLLM is missing or of an unknown version.
        RuntimeError: a vLLM engine is running in this process.
        ValueError: the environment or the configuration contradicts itself.
    """
    require_vllm()
    on_gpu = policy.device.type == "cuda"
    started = Started(None, [], 0, weights_sleep=sleeps and not shares)

    def load(model: nn.Module) -> None:
        weights = base_weights(policy) if adapters else checkpoint_weights(policy)
        started.landings = watch_loading(model.load_weights, weights)
        if shares:
            parameters = base_parameters(policy)
            started.landings = share(model, parameters, started.landings)
        own = {storage_of(p) for p in policy.model.parameters()} if shares else set()
        started.weight_bytes = size_in_bytes(model, without=own)

    logger.warning("vLLM %s starts, which takes about half a minute", installed_version())
    alone = config.tensor_parallel_size == 1
    compiles = not runs_eagerly(policy.device, config)
    with starting(alone=alone), _model_folder(policy, compiles=compiles) as folder, _loading_by(load):
        from vllm import LLM
        from vllm.platforms import current_platform

        require_device(policy.device, current_platform.device_type, config)
        require_processes(config)
        arguments = engine_arguments(policy, config, max_length, kv_cache_bytes)
        if adapters:
            arguments |= adapter_arguments(policy)
        if started.weights_sleep:
            require_empty_pool()
        if on_gpu:
            torch.cuda.synchronize(policy.device)  # vLLM goes on in a stream of its own, and so does training
        with weights_outside_the_pool() if sleeps and shares else nullcontext():
            started.llm = LLM(model=str(folder), enable_sleep_mode=sleeps, **arguments)
    if on_gpu:
        torch.cuda.empty_cache()  # what the policy's weights were in before they were shared
    return started


def require_device(device: torch.device, platform: str, config: VLLMConfig) -> None:
    """vLLM must work where the policy lies: it takes the first visible GPU, or the CPU it was built for.

    Raises:
        ValueError: it works elsewhere.
    """
    if device.type != platform:
        built_for = platform or "a GPU, and finds none"
        raise ValueError(
            f"the policy is on {device}, and the installed vLLM is one for {built_for}; change model.device, "
            "or set rollout.engine to transformers"
        )
    if device.index and config.tensor_parallel_size == 1:
        raise ValueError(
            f"the policy is on {device}, and vLLM takes the first visible GPU; set CUDA_VISIBLE_DEVICES = "
            f"{device.index} and model.device to cuda"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.tensor_parallel_size > 1 and (device.index or 0) != local_rank:
        raise ValueError(
            f"the policy is on {device}, and vLLM takes the GPU of LOCAL_RANK = {local_rank}; start it with "
            f"model.device=cuda:{local_rank}"
        )


def require_processes(config: VLLMConfig) -> None:
    """vLLM joins torch.distributed where it runs already, and its groups must fill it.

    Raises:
        ValueError: there are more or fewer processes than vLLM will use, or not those of torchrun.
    """
    wanted = config.tensor_parallel_size
    if wanted > 1 and int(os.environ.get("WORLD_SIZE", "1")) != wanted:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size = {wanted} needs as many processes, not "
            f"{os.environ.get('WORLD_SIZE', '1')}; start the run with torchrun --nproc-per-node {wanted}"
        )
    there = torch.distributed.get_world_size() if torch.distributed.is_initialized() else wanted
    if there != wanted:
        raise ValueError(
            f"torch.distributed runs with {there} processes, and vLLM would join it with "
            f"rollout.vllm.tensor_parallel_size = {wanted}; set it to {there}, or leave torch.distributed off"
        )


def runs_eagerly(device: torch.device, config: VLLMConfig) -> bool:
    return device.type == "cpu" if config.enforce_eager is None else config.enforce_eager


def engine_arguments(
    policy: Policy, config: VLLMConfig, max_length: int | None, kv_cache_bytes: int | None
) -> dict[str, Any]:
    """What `LLM` is called with, besides model, sleep and adapters."""
    arguments: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "dtype": str(policy.base_model.dtype).removeprefix("torch."),
        "seed": 0,  # requests bring their own
        "max_model_len": config.max_model_length or max_length or -1,  # -1: the model's, or what fits
        "enforce_eager": runs_eagerly(policy.device, config),
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # its own neutral defaults, not the model's
        "disable_log_stats": True,
    }
    if config.max_sequences is not None:
        arguments["max_num_seqs"] = config.max_sequences
    if config.fp32_head:
        require_version(FP32_HEAD_SINCE, "rollout.vllm.fp32_head = true")
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if config.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = config.tensor_parallel_size
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments | cache_arguments(policy.device, config, kv_cache_bytes)


def cache_arguments(device: torch.device, config: VLLMConfig, planned: int | None) -> dict[str, Any]:
    """How much memory is for keys and values: as configured, else as planned, else by a share.

    vLLM refuses to start where its share, by default 92 % of the device, is not free, even when a size is
    given instead: the share must leave out what the trainer holds already.
    """
    size = planned if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB)
    if device.type == "cpu":
        return {"kv_cache_memory_bytes": int(CPU_KV_GIB * GIB) if size is None else size}
    free, total = torch.cuda.mem_get_info(device)
    share = FREE_SHARE * free / total
    if size is not None:
        return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": share}
    return {"gpu_memory_utilization": config.gpu_memory_utilization or share}


def adapter_arguments(policy: Policy) -> dict[str, Any]:
    ranks = [config.r for config in policy.model.peft_config.values()]
    allowed = (8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [rank for rank in allowed if rank >= max(ranks)]
    if not fitting:
        raise ValueError(
            f"model.lora.r = {max(ranks)} exceeds the {allowed[-1]} that vLLM takes; set lora_sync to merged"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}


@contextmanager
def _model_folder(policy: Policy, *, compiles: bool) -> Iterator[Path]:
    """Configuration and tokenizer, which vLLM reads from disk; kept where it compiles the model."""
    with tempfile.TemporaryDirectory(prefix="grpo-fast-vllm-") as folder:
        config = policy.base_model.config
        config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        yield kept(Path(folder)) if compiles else Path(folder)


def kept(folder: Path) -> Path:
    """A copy in the cache, named by its content; the folder itself where the cache cannot be written.

    vLLM looks for a model that it has compiled before by the name of the folder: under a new name, every run
    compiles, and leaves what it compiled.
    """
    content = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        content.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    place = cache_folder() / "vllm" / content.hexdigest()[:24]
    with suppress(OSError):  # a full disk; or another run was faster
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as partial:
                shutil.copytree(folder, Path(partial) / "whole").rename(place)
    return place if place.is_dir() else folder


@contextmanager
def _loading_by(load: Any) -> Iterator[None]:
    """Register `load` as vLLM's way of filling a model with weights."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    pending = [load]

    class PolicyLoader(BaseModelLoader):
        def download_model(self, model_config: object) -> None: ...

        def load_weights(self, model: nn.Module, model_config: object) -> None:
            pending[0](model)

    register_model_loader(LOAD_FORMAT)(PolicyLoader)
    try:
        yield
    finally:
        pending.clear()  # vLLM keeps the class; it must not keep the policy
