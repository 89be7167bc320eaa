"""From a policy to a running vLLM: settings that fit the policy, its weights straight from memory.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
from torch import nn

from grpo_fast.config.rollout import VLLMConfig
from grpo_fast.config.section import short
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.policy.quantization import unquantized
from grpo_fast.policy.random_state import capture_rng, restore_rng
from grpo_fast.policy.recurrent import recurrent_mixers
from grpo_fast.policy.source import cache_folder
from grpo_fast.rollout.engines import Trained
from grpo_fast.rollout.vllm import IN_PROCESS, installed_version, require_vllm, version_problem
from grpo_fast.rollout.vllm.quantized import handed_out, register
from grpo_fast.rollout.vllm.repairs import repair
from grpo_fast.rollout.vllm.rules import keeps_adapters, kv_cache_gib, sharing_obstacle
from grpo_fast.rollout.vllm.sleep import GIB, require_empty_pool, weights_outside_the_pool
from grpo_fast.rollout.vllm.weights import Placement, checkpoint_weights, has_experts, share, watch_loading

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm import LLM

    from grpo_fast.policy import Policy

logger = logging.getLogger(__name__)
LOAD_FORMAT = "grpo_fast"
FP32_HEAD_SINCE = (0, 26)  # older ones warn, and generate with the model's own dtype
FREE_SHARE = 0.5  # of the free GPU memory, when nothing says how much vLLM may have
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes

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
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_running: list[object] = []


@dataclass(frozen=True)
class Choices:
    """What policy and configuration say of weights and sleep before vLLM starts."""

    adapters: bool  # LoRA as an adapter; merged, decoding needs no LoRA kernels, and any rank will do
    obstacle: str | None  # to one copy of the weights for policy and vLLM, wherever the layout allows it
    level: Literal["auto", 0, 1, 2]  # of sleep; auto: by the way that the weights will take

    @property
    def shares(self) -> bool:
        return self.obstacle is None


def choose(policy: Policy, config: VLLMConfig) -> Choices:
    """Raises ValueError for a setting that this device or policy cannot have."""
    on_gpu = policy.device.type == "cuda"
    trained = Trained(
        on_gpu, policy.has_adapters, policy.quantized, policy.sharded, experts=has_experts(policy)
    )
    adapters = keeps_adapters(config, trained)
    if config.lora_sync != "auto" and not policy.has_adapters:
        raise ValueError(
            f"rollout.vllm.lora_sync = {config.lora_sync!r}, but the policy has no LoRA; leave it at auto"
        )
    if policy.quantized and config.lora_sync == "merged":
        raise ValueError(
            "rollout.vllm.lora_sync = 'merged' adds LoRA to weights of 4 bits, which do not hold the sum; "
            "leave it at auto"
        )
    if policy.sharded and adapters:
        raise ValueError(
            "rollout.vllm.lora_sync = 'adapter' needs whole adapters on each rank, and distributed.mode = "
            "'shard' divides them; set lora_sync to merged, or mode to replicate"
        )
    if adapters and trained.experts and not on_gpu:
        raise ValueError(
            "rollout.vllm.lora_sync = 'adapter': beside adapters vLLM computes experts by Triton, which no "
            "CPU has; set it to merged"
        )
    if config.sleep_level == 2 and adapters:
        raise ValueError(
            "rollout.vllm.sleep_level = 2 drops the base that lora_sync = 'adapter' never sends again; set "
            f"sleep_level to 1{'' if policy.quantized else ', or lora_sync to merged'}"
        )
    if not on_gpu and config.sleep_level not in ("auto", 0):
        raise ValueError(
            f"rollout.vllm.sleep_level = {config.sleep_level} needs a GPU: on {policy.device.type} vLLM "
            "keeps its memory; leave it at auto"
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # which torch takes
    if not on_gpu and shutil.which(compiler) is None:
        raise ValueError(
            f"rollout.engine = 'vllm' compiles its sampler on a CPU, and there is no {compiler}: install it, "
            "or set engine to transformers"
        )
    obstacle = sharing_obstacle(config, trained)
    if config.share_weights is True and obstacle is not None:
        raise ValueError(f"rollout.vllm.share_weights = true: {obstacle}, or share_weights to auto")
    return Choices(adapters, obstacle, config.sleep_level if on_gpu else 0)


def start(
    policy: Policy,
    config: VLLMConfig,
    choices: Choices,
    max_length: int | None,
    world: World,
    tells_experts: bool = False,
) -> tuple[LLM, list[Placement]]:
    """Start vLLM in this process with the policy's weights. Nothing is read from disk, and none are random.

    Each rank of `world` starts one, and joins the others' where the configuration says so.

    Returns:
        vLLM, and where its loader put each weight.

    Raises:
        ImportError: vLLM is missing or of an unknown version.
        RuntimeError: a vLLM engine is running in this process.
        ValueError: the environment or the configuration contradicts itself.
    """
    require_vllm()
    on_gpu, sleeps = policy.device.type == "cuda", choices.level != 0
    quantized = choices.shares and policy.quantized
    placements: list[Placement] = []

    def load(model: Any) -> None:
        nonlocal placements
        repair(model, policy.device.type)
        base = policy.base_weights()
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
        require_device(policy.device, current_platform.device_type, world)
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
            torch.cuda.synchronize(policy.device)  # vLLM goes on in a stream of its own, and so does training
        place = weights_outside_the_pool() if sleeps and choices.shares else nullcontext()
        with place, telling_what_a_cpu_lacks(policy):
            llm = LLM(model=str(folder), enable_sleep_mode=sleeps, **arguments)
    if on_gpu:
        torch.cuda.empty_cache()  # what the policy's weights were in before they were shared
    return llm, placements


@contextmanager
def telling_what_a_cpu_lacks(policy: Policy) -> Iterator[None]:
    """Some of vLLM's models need what only GPUs have, or bfloat16, and say so wherever they come upon it."""
    try:
        yield
    except (AssertionError, AttributeError, ImportError, RuntimeError) as error:
        if policy.device.type != "cpu":
            raise
        model, why = policy.base_model, short(str(error), 300)
        raise ValueError(
            f"vLLM {installed_version()} does not run {type(model).__name__} in {model.dtype} on a CPU "
            f"({why}); set rollout.engine to transformers, or model.dtype to bfloat16 where it asks for that"
        ) from error


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


def engine_arguments(
    policy: Policy, config: VLLMConfig, adapters: bool, max_length: int | None
) -> dict[str, Any]:
    """What `LLM` is called with, besides model and sleep.

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
    size = kv_cache_gib(config, not on_cpu)
    if size is not None:
        arguments["kv_cache_memory_bytes"] = int(size * GIB)
    if not on_cpu:
        # vLLM refuses to start where its share, by default 92 % of the device, is not free, even when a size
        # is given instead: the share leaves out what the trainer holds already.
        free, total = torch.cuda.mem_get_info(policy.device)
        configured = config.gpu_memory_utilization if size is None else None
        arguments["gpu_memory_utilization"] = configured or FREE_SHARE * free / total
    return arguments


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


def graph_sizes(largest: int) -> list[int]:
    """Batches that CUDA graphs are captured for. vLLM's own miss a `largest` that 8 does not divide."""
    step = 8 * math.ceil(largest / 256)
    return [*(size for size in (1, 2, 4, *range(step, largest, step)) if size < largest), largest]


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
    environment = dict(os.environ)
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size and sys.platform == "linux"
    for name, value in (DEFAULTS | (ONE_HOST if one_host else {})).items():
        os.environ.setdefault(name, value)
    if settings := next((environment[name] for name in ALLOCATOR if name in environment), None):
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
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in environment:
                del os.environ[name]
        os.environ.update({n: value for n, value in environment.items() if not n.startswith("VLLM_")})
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
