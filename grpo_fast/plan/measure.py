"""The probe that measures activations on the device, and the random policies that it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.plan.model_shape import ModelShape, model_config, model_shape, random_model, with_layers
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.policy import PackedBatch, Policy, pack
from grpo_fast.policy.architecture import packing_obstacle
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.load import prepare_to_train, resolve_attention, resolve_dtype
from grpo_fast.policy.patches import Setting, apply_patches
from grpo_fast.policy.quantization import unquantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")
LAYERS = (2, 4)  # of the two forwards of the probe, whose difference is that of layers
SIZES = StepSizes(prompts=1, generations=2, prompt_length=1, completion_length=2048, micro_batch_tokens=4096)
_START = "grpo_fast: watched from here"


def measured_shape(model: ModelConfig, shape: ModelShape, device: torch.device) -> ModelShape:
    """Return the shape with the bytes that layers keep for the backward, as measured on the device.

    The probe takes two forwards of 4,096 tokens, through two and four of the model's layers with random
    weights, in seconds. Layers are neither compiled nor quantized, and so keep as much or more.

    Raises:
        torch.OutOfMemoryError: four layers with their activations do not fit.
    """
    found = model_config(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    config, depth = unquantized(found), found.get_text_config().num_hidden_layers
    if depth < max(LAYERS):
        return shape
    plain = {"gradient_checkpointing": False, "compile": False, "quantization": None}
    model = model.model_copy(update=plain | {"dtype": resolve_dtype(model.dtype, device.type)})
    attention = resolve_attention(model.attention, device, model.dtype, config)
    kept, counted = [], []
    for layers in (with_layers(config, count) for count in LAYERS):
        counts = model_shape(layers, model)
        counted.append(sum(sum(counts.kept(layer, fused=False)) for layer in counts.layers))
        prepare = partial(_forward_inputs, layers, model, attention, device)
        peak = peak_bytes(prepare, lambda given: given[0].hidden_states(given[1]), device)
        kept.append(peak - counts.bytes)
    slope = (kept[1] - kept[0]) / SIZES.micro_batch.inputs
    return replace(shape, measured=slope / (counted[1] - counted[0]))


def _forward_inputs(
    config: PretrainedConfig, model: ModelConfig, attention: str, device: torch.device
) -> tuple[Policy, PackedBatch]:
    policy = random_policy(config, model, attention=attention, device=device)
    return policy, random_batches(policy, SIZES)[0]


def peak_bytes(prepare: Callable[[], T], work: Callable[[T], object], device: torch.device) -> int:
    """Return the peak bytes of torch's allocator while `work` runs on the result of `prepare`.

    Allocations of `prepare` count, earlier ones do not. On a CPU torch's profiler reports all allocations.
    """
    gc.collect()  # earlier garbage must not be freed meanwhile
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        made = prepare()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work(made)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        made = prepare()
        with record_function(_START):
            pass
        work(made)
    events = profiler.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == _START)
    held = highest = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() >= start:
                highest = max(highest, held)
    return highest


def random_policy(
    config: PretrainedConfig, model: ModelConfig, *, attention: str, device: torch.device
) -> Policy:
    """Return a policy as `load_policy` does, with random weights, not quantized, without a tokenizer."""
    register()
    own = PACKED_ATTENTION if packing_obstacle(config) is None else None
    base = random_model(config, model, attention=own, device=device)
    trained = prepare_to_train(base, model)
    apply_patches(base, Setting(model, base.device))
    packs = own is not None and model.packing == "auto"
    return Policy(trained, cast("PreTrainedTokenizerBase", None), attention=attention, packs=packs)


def random_batches(policy: Policy, sizes: StepSizes) -> list[PackedBatch]:
    """Return the micro-batches of one optimizer step."""
    vocabulary = policy.head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def sample(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())

    prompts = [sample(sizes.prompt_length) for _ in range(sizes.groups)]
    groups = [number for number in range(sizes.groups) for _ in range(sizes.generations)]
    answers = [sample(sizes.completion_length) for _ in groups]
    table = CompletionTable.of([prompts[number] for number in groups], answers, groups)
    zeros = torch.zeros(len(table.token_ids))
    table = table.with_columns(advantages=zeros + 1, sampler_logprobs=zeros)
    most = sizes.micro_batch_tokens
    return pack(table, max_tokens=most, device=policy.device, shares_prompts=policy.packs)
