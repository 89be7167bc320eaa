"""From a policy to a running vLLM, its weights straight from memory.

Importing and starting vLLM sets environment variables, seeds every global generator, replaces
`torch.set_num_threads` on a CPU and logs at length; `starting` leaves the process as it was.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.config.section import short
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head.parameters import is_quantized
from grpo_fast.policy.host_memory import waiting_on_host
from grpo_fast.policy.out_of_memory import ALLOCATOR
from grpo_fast.policy.quantization import unquantized
from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.policy.source import cache_folder
from grpo_fast.rollout.vllm import IN_PROCESS, installed_version, require_vllm
from grpo_fast.rollout.vllm.quantized import handed_out, register
from grpo_fast.rollout.vllm.settings import (
    LOAD_FORMAT,
    Choices,
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
# What the environment may say otherwise. FlashInfer's sampler gives no processed log-probabilities, and must
# not be looked for where it is not installed.
DEFAULTS = {
    IN_PROCESS: "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# Ranks of one host talk to no other, and start where it has no name or no network.
ONE_HOST = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

_running: list[object] = []


def start(
    policy: Policy,
    config: VLLMConfig,
    choices: Choices,
    max_length: int | None,
    world: World,
    tells_experts: bool = False,
    share_of_cache: float = 1.0,
) -> tuple[LLM, list[Placement]]:
    """Start vLLM in this process with the policy's weights. Nothing is read from disk, and none are random.

    Each rank of `world` starts one, and joins the others' where the configuration says so. Weights that the
    two will share wait on the host while vLLM builds its model: the device never holds both copies.

    Returns:
        vLLM, and where its loader put each weight.

    Raises:
        ImportError: vLLM is missing or of an unknown version.
        RuntimeError: a vLLM engine is running in this process.
        ValueError: the environment or the configuration contradicts itself.
    """
    require_vllm()
    device, sleeps = policy.device, choices.level != 0
    on_gpu = device.type == "cuda"
    quantized = choices.shares and policy.quantized
    placements: list[Placement] = []
    base = policy.base_weights()

    def load(model: Any) -> None:
        nonlocal placements
        weights = handed_out(base) if quantized else checkpoint_weights(policy, adapters=not choices.adapters)
        try:
            placements = watch_loading(model.load_weights, weights)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"vLLM {installed_version()} does not take the weights of {type(policy.base_model).__name__} "
                f"under the names that transformers has for them ({short(str(error), 120)}); set "
                "rollout.engine to transformers"
            ) from error
        if choices.shares:
            placements = share(model, base, placements)
        bring_back()  # what has no place in vLLM, before vLLM measures the memory that is left

    if world.is_main:
        logger.warning("vLLM %s starts, which takes about half a minute", installed_version())
    arguments = engine_arguments(policy, config, choices.adapters, max_length)
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
        if sleeps and not choices.shares:
            require_empty_pool()
        folder = Path(made)  # configuration and tokenizer, which vLLM reads from disk
        unquantized(policy.base_model.config).save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        policy.save_processor(folder)
        if not arguments["enforce_eager"]:
            folder = cached_model_folder(folder)
        if on_gpu:
            torch.cuda.synchronize(device)  # vLLM goes on in a stream of its own, and so does training
        else:
            keep_weights_unpacked()
        waiting = movable(base) if choices.shares else []
        with (
            waiting_on_host(waiting, device) as bring_back,
            weights_outside_the_pool() if sleeps and choices.shares else nullcontext(),
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


def movable(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the weights that can wait on the host: vLLM reads 4-bit ones where they are."""
    return [weight for weight in weights.values() if not is_quantized(weight)]


def keep_weights_unpacked() -> None:
    """Have vLLM keep the weights of linear layers on a CPU as on a GPU.

    Packed, they could not be shared, and vLLM 0.32 would leave a head that is tied to the embedding as it was
    packed first, whatever an update sends.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:  # a convolution, whose kernel wants it packed
            pack(layer, remove_weight)

    if pack.__module__ != __name__:  # by the engine before
        utils.dispatch_cpu_unquantized_gemm = keep


def require_device(device: torch.device, platform: str, world: World = SINGLE_PROCESS) -> None:
    """Raises ValueError where vLLM, on the first visible GPU or a CPU, would not be where the policy is.

    Of several ranks each takes the GPU of its LOCAL_RANK, as its policy does.
    """
    if device.type != platform:
        built_for = platform or "a GPU, and finds none"
        raise ValueError(
            f"the policy is on {device}, and the installed vLLM is one for {built_for}; change model.device, "
            "or set rollout.engine to transformers"
        )
    if device.index and world.size == 1:
        raise ValueError(
            f"the policy is on {device}, and vLLM takes the first visible GPU; set CUDA_VISIBLE_DEVICES = "
            f"{device.index} and model.device to cuda"
        )


def require_processes(world: World) -> None:
    """Raises ValueError where torch.distributed, which vLLM would join, runs with others than `world`."""
    found = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if found != world.size:
        raise ValueError(
            f"torch.distributed runs with {found} processes, which vLLM would join, and the engine's "
            f"world.size = {world.size}; give the world that `joined` opens, or leave torch.distributed off"
        )


def cached_model_folder(folder: Path) -> Path:
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
def _loading_by(load: Callable[[nn.Module], None]) -> Iterator[None]:
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


@contextmanager
def starting(world: World = SINGLE_PROCESS) -> Iterator[None]:
    """Around the import of vLLM and the making of its engine; RuntimeError where one runs in this process."""
    if _running:
        raise RuntimeError(
            "a vLLM engine is running in this process, and its memory pool allows one; close it first (use "
            "the engine as a context manager)"
        )
    before = dict(os.environ)
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size and sys.platform == "linux"
    for name, value in (DEFAULTS | (ONE_HOST if one_host else {})).items():
        os.environ.setdefault(name, value)
    if settings := next((before[name] for name in ALLOCATOR if name in before), None):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings  # where vLLM looks for expandable segments
    rng = capture_rng()
    precision = torch.get_float32_matmul_precision()
    _running.append(object())
    # vLLM gives its loggers the level only after a first import that logs already.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    try:
        with warnings.catch_warnings(), patch.object(torch, "set_num_threads", torch.set_num_threads):
            for category in (DeprecationWarning, FutureWarning):  # vLLM's, of torch: not for us to heed
                warnings.simplefilter("ignore", category)
            yield
    except BaseException:
        if torch.distributed.is_initialized():  # vLLM's groups, which the next start would trip over
            from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

            with keeping_ranks(world):
                destroy_model_parallel()
                destroy_distributed_environment()
        stopped()
        raise
    finally:
        torch.set_float32_matmul_precision(precision)
        restore_rng(rng)
        # What vLLM set for itself it may read again; LD_PRELOAD and the like would reach child processes.
        own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        os.environ.clear()
        os.environ.update(before | own)
        if settings and torch.cuda.is_initialized():
            # vLLM limits how blocks are split while it loads, and before 0.31 drops every other setting.
            torch._C._accelerator_setAllocatorSettings(settings)


def keeping_ranks(world: World) -> AbstractContextManager[Any]:
    """Around vLLM's end, which would take torch.distributed down where the ranks go on."""
    destroy = torch.distributed.destroy_process_group

    def destroy_own(group: Any = None) -> None:
        if group is not None or world.size == 1:
            destroy(group)

    return patch.object(torch.distributed, "destroy_process_group", destroy_own)


def stopped() -> None:
    """The engine is gone; another may start."""
    _running.clear()
