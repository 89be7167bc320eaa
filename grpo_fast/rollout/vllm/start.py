"""Start vLLM with a policy's weights from memory.

Importing and starting vLLM sets environment variables, seeds all global generators, replaces
`torch.set_num_threads` on a CPU and logs a lot; `starting` restores the process.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.config.section import short
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head.parameters import is_quantized
from grpo_fast.policy.host_memory import waiting_on_host
from grpo_fast.policy.out_of_memory import ALLOCATOR
from grpo_fast.policy.quantization import unquantized
from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.policy.source import cache_folder
from grpo_fast.rollout.engines import Weights
from grpo_fast.rollout.vllm import IN_PROCESS, installed_version, require_vllm
from grpo_fast.rollout.vllm.quantized import handed_out, register
from grpo_fast.rollout.vllm.settings import (
    LOAD_FORMAT,
    engine_arguments,
    memory_arguments,
    require_positions,
)
from grpo_fast.rollout.vllm.sleep import bounded_cache, require_empty_pool, weights_outside_the_pool
from grpo_fast.rollout.vllm.weights import Placement, checkpoint_weights, share, watch_loading

if TYPE_CHECKING:
    from vllm import LLM

    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
# Defaults of environment variables. FlashInfer's sampler returns no processed log-probabilities.
DEFAULTS = {
    IN_PROCESS: "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# For ranks on one host, which may have no name and no network.
ONE_HOST = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

_running: list[object] = []


def start(
    policy: Policy,
    config: VLLMConfig,
    weights: Weights,
    max_length: int | None,
    world: World,
    tells_experts: bool = False,
    share_of_cache: float = 1.0,
) -> tuple[LLM, list[Placement]]:
    """Start vLLM in this process, on each rank of `world`, with the policy's weights.

    Shared weights wait on the host while vLLM builds its model, so that the device never holds two copies.

    Returns:
        vLLM, and where its loader put each weight.

    Raises:
        ImportError: vLLM is missing or unsupported.
        RuntimeError: a vLLM engine is running in this process.
        ValueError: contradictory environment or configuration.
    """
    require_vllm()
    device, on_gpu = policy.device, policy.device.type == "cuda"
    sleeps, quantized = on_gpu and config.sleep_level != 0, weights.shared and policy.quantized
    placements: list[Placement] = []
    base = policy.base_weights()

    def load(model: Any) -> None:
        nonlocal placements
        given = handed_out(base) if quantized else checkpoint_weights(policy, adapters=not weights.adapters)
        try:
            placements = watch_loading(model.load_weights, given)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"vLLM {installed_version()} does not know the weights of {type(policy.base_model).__name__} "
                f"by transformers' names ({short(str(error), 120)}); set rollout.engine to transformers"
            ) from error
        if weights.shared:
            placements = share(model, base, placements)
        bring_back()  # weights that vLLM does not share, before it measures the free memory

    if world.is_main:
        logger.warning("starting vLLM %s, which takes about half a minute", installed_version())
    arguments = engine_arguments(policy, config, weights.adapters, max_length)
    require_positions(policy.base_model.config.get_text_config(), arguments["max_model_len"])
    if tells_experts:
        arguments["enable_return_routed_experts"] = True
    if world.size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    with starting(world), tempfile.TemporaryDirectory(prefix="grpo-fast-vllm-") as made, _loading_by(load):
        from vllm import LLM
        from vllm.platforms import current_platform

        if quantized:
            arguments["quantization"] = register()
        require_device(device, current_platform.device_type, world)
        require_processes(world)
        if sleeps and not weights.shared:
            require_empty_pool()
        folder = Path(made)  # for configuration and tokenizer
        unquantized(policy.base_model.config).save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        policy.save_processor(folder)
        if not arguments["enforce_eager"]:
            folder = cached_model_folder(folder)
        if on_gpu:
            torch.cuda.synchronize(device)  # vLLM uses another stream
        else:
            keep_weights_unpacked()
        # vLLM reads 4-bit weights where they are.
        waiting = [w for w in base.values() if not is_quantized(w)] if weights.shared else []
        with (
            waiting_on_host(waiting, device) as bring_back,
            weights_outside_the_pool() if sleeps and weights.shared else nullcontext(),
            bounded_cache(config.kv_cache_gib or math.inf, share_of_cache) if on_gpu else nullcontext(),
        ):
            shared = sum(weight.nbytes for weight in waiting)
            arguments |= memory_arguments(config, device, shared, share_of_cache)
            try:
                llm = LLM(model=str(folder), enable_sleep_mode=sleeps, **arguments)
            except ValueError as error:
                if "does not support LoRA" not in str(error):
                    raise
                raise ValueError(f"vLLM: {error} Set rollout.vllm.lora_sync to merged") from error
    return llm, placements


def keep_weights_unpacked() -> None:
    """Keep vLLM from packing the weights of linear layers on a CPU.

    Packed weights cannot be shared, and vLLM 0.32 never updates a packed head that is tied to the embedding.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:  # a convolution, whose kernel requires it
            pack(layer, remove_weight)

    if pack.__module__ != __name__:  # not yet replaced
        utils.dispatch_cpu_unquantized_gemm = keep


def require_device(device: torch.device, platform: str, world: World = SINGLE_PROCESS) -> None:
    """Raise ValueError if vLLM would use another device than the policy: one process takes the first GPU."""
    if device.type != platform:
        built_for = platform or "a GPU, but finds none"
        raise ValueError(
            f"the policy is on {device}, and the installed vLLM is built for {built_for}; change "
            "model.device, or set rollout.engine to transformers"
        )
    if device.index and world.size == 1:
        raise ValueError(
            f"the policy is on {device}, and vLLM takes the first visible GPU; set CUDA_VISIBLE_DEVICES = "
            f"{device.index} and model.device to cuda"
        )


def require_processes(world: World) -> None:
    """Raise ValueError if torch.distributed, which vLLM joins, has other processes than `world`."""
    found = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if found != world.size:
        raise ValueError(
            f"torch.distributed has {found} processes, which vLLM would join, but the engine's world.size = "
            f"{world.size}; pass the world of `joined`, or leave torch.distributed off"
        )


def cached_model_folder(folder: Path) -> Path:
    """Copy a folder into the cache under a name from its content; return the folder if that fails.

    vLLM's compilation cache uses the name of the model's folder: a new name would compile in every run.
    """
    content = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        content.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    place = cache_folder() / "vllm" / content.hexdigest()[:24]
    with suppress(OSError):  # a full disk, or a concurrent run
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as partial:
                shutil.copytree(folder, Path(partial) / "whole").rename(place)
    return place if place.is_dir() else folder


@contextmanager
def _loading_by(load: Callable[[nn.Module], None]) -> Iterator[None]:
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
        pending.clear()  # vLLM keeps the class, which must not keep the policy


@contextmanager
def starting(world: World = SINGLE_PROCESS) -> Iterator[None]:
    """Import vLLM and make its engine within; raises RuntimeError if one runs in this process."""
    if _running:
        raise RuntimeError(
            "a vLLM engine is running in this process, which allows only one; close it first (use the engine "
            "as a context manager)"
        )
    before = dict(os.environ)
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size and sys.platform == "linux"
    for name, value in (DEFAULTS | (ONE_HOST if one_host else {})).items():
        os.environ.setdefault(name, value)
    if settings := next((before[name] for name in ALLOCATOR if name in before), None):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings  # where vLLM reads expandable segments
    rng = capture_rng()
    precision = torch.get_float32_matmul_precision()
    _running.append(object())
    # vLLM sets the level of its loggers only after its first import has logged.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    try:
        with warnings.catch_warnings(), patch.object(torch, "set_num_threads", torch.set_num_threads):
            for category in (DeprecationWarning, FutureWarning):  # about vLLM's calls of torch
                warnings.simplefilter("ignore", category)
            yield
    except BaseException:
        if torch.distributed.is_initialized():  # vLLM's groups, which break the next start
            from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

            with keeping_ranks(world):
                destroy_model_parallel()
                destroy_distributed_environment()
        stopped()
        raise
    finally:
        torch.set_float32_matmul_precision(precision)
        restore_rng(rng)
        # vLLM may read its own variables again. Others, as LD_PRELOAD, must not reach child processes.
        own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(before | own)
        if settings and torch.cuda.is_initialized():
            # While loading, vLLM limits the splitting of blocks; before 0.31 it drops all other settings.
            torch._C._accelerator_setAllocatorSettings(settings)


def keeping_ranks(world: World) -> AbstractContextManager[Any]:
    """Keep vLLM's shutdown from destroying the default process group of several ranks."""
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None or world.size == 1:
            destroy(group)

    return patch.object(torch.distributed, "destroy_process_group", destroy_own)


def stopped() -> None:
    """Allow another engine to start."""
    _running.clear()
