"""Load a policy from its configuration: device, dtype, attention, packing, weights, and what trains."""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_fast.config.distributed import DistributedConfig
from grpo_fast.config.paths import user_path
from grpo_fast.config.policy import ModelConfig, ReferenceConfig
from grpo_fast.data.images import ImageReader
from grpo_fast.data.template import turn_ends
from grpo_fast.distributed.world import SINGLE_PROCESS, World
from grpo_fast.head.operator import backend_on
from grpo_fast.policy.adapters import add_lora
from grpo_fast.policy.architecture import (
    check_architecture,
    packing_obstacle,
    require_vocabulary,
    verify_policy,
)
from grpo_fast.policy.attention import PACKED_ATTENTION, flash_obstacle, head_dims, register
from grpo_fast.policy.driver import hidden_gpu
from grpo_fast.policy.experts import expert_count, is_router, require_router
from grpo_fast.policy.flash import PACKAGES, TORCH, installed, newest_flash, package_obstacle
from grpo_fast.policy.layers import resolve_liger
from grpo_fast.policy.patches import Setting, apply_patches
from grpo_fast.policy.policy import Policy
from grpo_fast.policy.quantization import cast_rest, loading_settings, quantizes
from grpo_fast.policy.routing import RoutingReplay
from grpo_fast.policy.source import (
    load_processor,
    load_whole,
    loading,
    origin_of,
    processor_files,
    resolve_source,
)
from grpo_fast.policy.vision import auto_class, freeze_vision, sees_images

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
REPLICATE = DistributedConfig(mode="replicate")


def load_policy(
    config: ModelConfig,
    *,
    needs_reference: bool = False,
    reference: ReferenceConfig | None = None,
    world: World = SINGLE_PROCESS,
    distributed: DistributedConfig = REPLICATE,
    router_replay: bool = False,
) -> Policy:
    """Load model and tokenizer, freeze or adapt weights, and verify the packed forward.

    Args:
        config: the run's `model` section.
        needs_reference: keep the initial policy for a KL term. Costs a second copy of the weights for full
            fine-tuning, nothing for LoRA.
        reference: the run's section; with a path, that model is the reference.
        world: the ranks that train together; all of them call this.
        distributed: the run's section, without `auto`; in mode shard each rank keeps rows of the weights.
        router_replay: as `rollout.router_replay`.

    Raises:
        ValueError: a wrong path, device or combination, or a model whose forward is not supported.
        ImportError: an optional package is missing.
    """
    device = resolve_device(config.device) if world.size == 1 else world.device
    config = config.model_copy(update={"dtype": resolve_dtype(config.dtype, device.type)})
    architecture = load_architecture(config)
    attention = resolve_attention(config.attention, device, config.dtype, architecture)
    require_head(config, device)
    packs = resolve_packing(config, architecture)
    resolve_liger(config, device, architecture.model_type)  # raises before weights are read
    if config.gradient_checkpointing == "offload" and device.type != "cuda":
        raise ValueError(
            "model.gradient_checkpointing = 'offload' moves layers' inputs from a GPU to host memory, and "
            f"model.device is {device.type}; set it to true"
        )
    tokenizer = load_tokenizer(config)
    other = None
    if needs_reference and reference is not None and reference.path is not None:
        other = reference.model(config)
        with _named_reference():
            require_same_tokens(tokenizer, load_tokenizer(other), other.path)
    shards = world.size > 1 and distributed.mode == "shard"
    if shards and quantizes(config, architecture):
        raise ValueError("distributed.mode = 'shard' cannot divide quantized weights; set it to replicate")
    home = torch.device("cpu") if shards else device  # FSDP2 moves each layer from there
    register()
    model = _load_model(config, architecture, home)
    require_vocabulary(tokenizer, model, config.path)
    end_at_turns(model, tokenizer)
    frozen: Any = None
    if other is not None:
        with _named_reference():
            frozen = _load_model(other, load_architecture(other), home)
            require_vocabulary(tokenizer, frozen, other.path)
    elif needs_reference and config.lora is None:
        frozen = copy.deepcopy(model)
    if frozen is not None:
        frozen.eval().requires_grad_(False)
        apply_patches(frozen, Setting(config, device, trains=False))
    trained = prepare_to_train(model, config)
    replay = RoutingReplay() if router_replay else None
    apply_patches(model, Setting(config, device, replay=replay))
    policy = Policy(
        trained,
        tokenizer,
        attention=attention,
        packs=packs,
        reference=frozen,
        head_tolerance=config.head_tolerance,
        router_aux_loss=config.router_aux_loss,
        routing=replay,
        image_reader=load_image_reader(config),
    )
    checksums = world.gather_from_all("the weights", partial(_checksum, model)) if world.size > 1 else []
    if len({*checksums}) > 1:
        raise ValueError(
            f"model.path = {config.path!r} is not the same on all ranks: the weights' checksums are "
            f"{checksums}; give a folder that all ranks see, or a model.revision"
        )
    if shards:
        with world.all_succeed("the weights"):
            policy.shard(world)
    problem = _problem(policy, world)
    if problem is not None and policy.packs:
        policy.packs, packed = False, problem
        if (problem := _problem(policy, world)) is None:
            logger.warning("model.packing = none is chosen: %s", packed)
    if problem is not None:
        raise ValueError(problem)
    if other is not None:
        with policy.reference() as reference_policy, _named_reference():
            if (problem := _problem(reference_policy, world)) is not None:
                raise ValueError(problem)
    if replay is not None:
        if not policy.packs:
            problem = f"needs packing, and {type(model).__name__} is not packed (model.packing = none)"
            raise ValueError(f"rollout.router_replay = true {problem}; leave it out")
        replay.verify(policy)
    return policy


def _load_model(config: ModelConfig, architecture: PreTrainedConfig, home: torch.device) -> Any:
    """Load the transformers model in the configured dtype, without adapters and patches."""
    dtype, quantized = getattr(torch, config.dtype), quantizes(config, architecture)
    model: Any = load_whole(
        config.path,
        resolve_source(config.path),
        auto_class(architecture),
        dtype=dtype,
        # Outside packed batches this is transformers' SDPA, with softcap and sinks.
        attn_implementation=PACKED_ATTENTION if packing_obstacle(architecture) is None else None,
        use_safetensors=True,
        **origin_of(config),
        **(loading_settings(config, home) if quantized else {}),
    )
    return cast_rest(model, dtype) if quantized else model.to(home)


@contextmanager
def _named_reference() -> Iterator[None]:
    """Name the section `reference` in errors about its model."""
    try:
        yield
    except (ValueError, ImportError) as error:
        message = re.sub(r"\bmodel\.(path|quantization|revision)\b", r"reference.\1", str(error))
        raise type(error)(message if "reference." in message else f"reference.path: {message}") from error


def require_same_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, path: str
) -> None:
    """Raise ValueError if a token id has another text in the tokenizer of `path`."""
    ours, theirs = ({i: text for text, i in one.get_vocab().items()} for one in (tokenizer, other))
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:
        first = differing[0]
        raise ValueError(
            f"reference.path = {path!r} has another vocabulary than model.path: {len(differing):,} of "
            f"{max(len(ours), len(theirs)):,} tokens differ, the first is {first}, {theirs.get(first)!r} for "
            f"{ours.get(first)!r}; give a model of the same family, with the same tokenizer"
        )


def end_at_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the token that ends a turn of the chat template to the model's end tokens."""
    ends, known = turn_ends(tokenizer), model.generation_config.eos_token_id
    ids = [i for i in (known if isinstance(known, list | tuple) else [known]) if i is not None]
    if ends and not {*ends} & {*ids, tokenizer.eos_token_id}:
        logger.warning(
            "the chat template ends a turn with %r, which is no end token of %s (%s): it is added to the "
            "eos_token_id of generation_config",
            *(tokenizer.decode([ends[0]]), model.config.name_or_path, tokenizer.decode(ids) or "it has none"),
        )
        model.generation_config.eos_token_id = [*ids, ends[0]]


def _problem(policy: Policy, world: World) -> str | None:
    """Return the error of `verify_policy` on the first rank that has one."""

    def problem_here() -> str | None:
        try:
            verify_policy(policy)
        except ValueError as problem:
            return str(problem)
        return None

    return next(filter(None, world.gather_from_all("the check of the model", problem_here)), None)


def require_head(config: ModelConfig, device: torch.device) -> None:
    """Raise ValueError if `model.head = 'triton'` cannot run; warn if a GPU lacks Triton."""
    missing = "Triton is not installed: pip install 'grpo-fast[triton]'"
    without = device.type == "cuda" and importlib.util.find_spec("triton") is None
    if without and config.head == "triton":
        raise ValueError(f"model.head = 'triton': {missing}, or set it to auto")
    if without and config.head == "auto":
        logger.warning("model.head = 'auto' takes plain torch, since %s", missing)
    backend = partial(backend_on, device.type, device.index)
    if config.head == "triton" and backend(getattr(torch, config.dtype)) != "triton":
        problem = f"needs Triton and a GPU from Ampere or CDNA on, and the device is {device}"
        raise ValueError(f"model.head = 'triton' {problem}; set it to auto")


def resolve_packing(config: ModelConfig, architecture: PreTrainedConfig) -> bool:
    """Return whether a prompt's completions share a document; ValueError if `attention` needs packing."""
    obstacle = _obstacle(config, architecture)
    if obstacle is None:
        return True
    if config.attention not in ("auto", "sdpa"):
        raise ValueError(
            f"model.attention = {config.attention!r} is for packed completions, and {obstacle}: padded "
            "batches use the model's own attention; set model.attention = auto"
        )
    if config.packing == "auto":
        logger.warning(
            "model.packing = none is chosen: %s cannot be packed, as %s; each completion computes its prompt",
            *(architecture.model_type, obstacle),
        )
    return False


def _obstacle(config: ModelConfig, architecture: PreTrainedConfig) -> str | None:
    return "model.packing = none" if config.packing == "none" else packing_obstacle(architecture)


def require_replay(config: ModelConfig, architecture: PreTrainedConfig) -> None:
    """Raise ValueError if the model does not support `rollout.router_replay`, by its configuration."""
    obstacle = _obstacle(config, architecture)
    if not expert_count(architecture):
        obstacle = "it has no experts, so no router"
    if obstacle is not None:
        kind = architecture.model_type
        raise ValueError(
            f"rollout.router_replay = true does not go with model_type = {kind!r}: {obstacle}; leave it out"
        )


def _checksum(model: nn.Module) -> int:
    """Sum all bits of the weights, with the same result on any device."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    weights = (parameter.detach() for parameter in model.parameters())
    return sum(int(weight.view(kinds[weight.itemsize]).sum(dtype=torch.int64)) for weight in weights)


def prepare_to_train(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel | PeftModel:
    """Add adapters or freeze weights as configured, or raise ValueError for wrong targets of LoRA.

    Only LoRA's dropout is ever in training mode. Other dropout, router jitter or dropped layers would train
    another policy than the one that sampled.
    """
    trained: PreTrainedModel | PeftModel = model
    if config.lora is not None:
        trained = add_lora(model, config.lora)
    else:
        freeze_vision(model)
        if not config.train_lm_head:
            model.get_output_embeddings().requires_grad_(False)
    if not config.train_router:
        for name, parameter in model.named_parameters():
            if is_router(name):  # also adapters, which peft adds to some routers by itself
                parameter.requires_grad_(False)
    trained.eval()
    for module in trained.modules():
        if isinstance(dropout := getattr(module, "lora_dropout", None), nn.Module):
            dropout.train()
    return trained


def resolve_device(name: str) -> torch.device:
    """Return the device, or raise ValueError for one that cannot be used; `auto` is CUDA if there is one."""
    if name == "auto":
        if (problem := hidden_gpu()) is not None:
            raise ValueError(f"{problem}. To train on the CPU, set model.device = cpu")
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"model.device = {name!r} is not a device; give auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        why = hidden_gpu() or "torch finds no CUDA device"
        raise ValueError(f"model.device = {name!r}, but {why}; give auto or cpu")
    return device


def resolve_dtype(name: str, device_type: str) -> str:
    """Return the dtype; `auto` is bfloat16 on a GPU, and the faster dtype on a CPU."""
    if name != "auto":
        return name
    return faster_dtype() if device_type == "cpu" else "bfloat16"


@cache
def faster_dtype() -> str:
    """Return bfloat16 or float32, whichever this CPU multiplies faster."""
    seconds = {name: _product_seconds(getattr(torch, name)) for name in ("bfloat16", "float32")}
    faster, slower = sorted(seconds, key=seconds.__getitem__)
    ratio = seconds[slower] / seconds[faster]
    logger.warning(
        "chosen for this CPU: model.dtype = %s, which multiplies %.1f times as fast as %s",
        *(faster, ratio, slower),
    )
    return faster


def _product_seconds(dtype: torch.dtype) -> float:
    """Measure one thread's CPU time, the least of three, which other processes do not change."""
    from torch.utils.benchmark import Timer  # a slow import

    matrices = {name: torch.ones(rows, 1024, dtype=dtype) for name, rows in (("left", 128), ("right", 1024))}
    timer = Timer("left @ right.T", timer=time.thread_time, globals=matrices, num_threads=1)
    return min(timer.timeit(1).mean for _ in range(3))


def resolve_attention(name: str, device: torch.device, dtype: str, architecture: PreTrainedConfig) -> str:
    """Return the attention, or raise ValueError; `auto` is flash-attention where it fits, else SDPA."""
    on_gpu, major = device.type == "cuda", 8
    if name != "auto" and name not in PACKAGES:
        return name
    if on_gpu and torch.cuda.is_available():
        major = torch.cuda.get_device_capability(device)[0]
    widest = max(head_dims(architecture.get_text_config()))
    flash = newest_flash(major, widest) if name == "auto" else name
    obstacle = flash_obstacle(architecture, softcaps=installed(flash))
    if not on_gpu or dtype == "float32":
        obstacle = f"it runs on a GPU in 16 bits, not on {device.type} in {dtype}"
    elif major < 8:
        obstacle = "the GPU is older than Ampere"
    elif obstacle is None and flash != TORCH:
        obstacle = package_obstacle(flash, major, widest)
    if obstacle is None:
        return flash
    if name == "auto":
        if on_gpu:
            logger.warning("model.attention = sdpa is chosen, slower than flash-attention: %s", obstacle)
        return "sdpa"
    raise ValueError(f"model.attention = {name!r} does not fit: {obstacle}; give auto")


def load_architecture(config: ModelConfig) -> PreTrainedConfig:
    """Load the configuration of a model, or raise ValueError or ImportError if it cannot be trained."""
    from transformers import AutoConfig

    source = resolve_source(config.path)
    with loading(config.path, source):
        architecture = AutoConfig.from_pretrained(source, **origin_of(config))
    check_architecture(architecture)
    quantizes(config, architecture)
    require_router(config, architecture)
    return architecture


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or raise ValueError for a wrong path or template, before any weight is read."""
    from transformers import AutoTokenizer

    template = config.chat_template
    source, name, key, origin = resolve_source(config.path), config.path, "model.path", origin_of(config)
    if config.tokenizer is not None:
        source, name, key, origin = config.tokenizer, config.tokenizer, "model.tokenizer", {}
    if template is not None and "{%" not in template:
        try:
            template = user_path(template, "model.chat_template").read_text(encoding="utf-8")
        except OSError as error:
            problem = f"model.chat_template = {config.chat_template!r} cannot be read: {error.strerror}"
            raise ValueError(problem) from error
    load_architecture(config)  # refuses a model that cannot be trained
    with loading(name, source, "tokenizer", key):
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_image_reader(config: ModelConfig) -> ImageReader | None:
    """Return the reader of prompts' images, or None for a text-only model."""
    architecture = load_architecture(config)
    if not sees_images(architecture):
        return None
    return ImageReader(partial(load_processor, config, architecture), processor_files(config))
