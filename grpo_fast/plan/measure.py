"""Measured bytes, to hold predictions against: a real update of random weights, watched by the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from grpo_fast.config.policy import ModelConfig
from grpo_fast.config.schema import TrainConfig
from grpo_fast.data.table import CompletionTable
from grpo_fast.loop.update import packed_loss
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import Shapes, random_model, with_layers
from grpo_fast.plan.prediction import Predictor, transient_bytes
from grpo_fast.plan.sizes import StepSizes, step_sizes
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, pack
from grpo_fast.policy.architecture import packing_obstacle
from grpo_fast.policy.attention import PACKED_ATTENTION, register

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

T = TypeVar("T")
CALIBRATED_LAYERS = 4  # of the model: its layers repeat
CALIBRATED_TOKENS = 4096
_START = "grpo_fast: watched from here"


def calibrated(run: TrainConfig, shapes: Shapes, device: DeviceBudget) -> DeviceBudget:
    """This machine's device with what an update of a few of the model's layers on it corrects.

    Weights and optimizer are known exactly; the correction is of the bytes of a micro-batch and, on a GPU, of
    those that the process takes beside torch's allocator. Completions are shortened to a micro-batch of 4,096
    tokens, one group of two.

    Raises:
        ValueError: as `step_sizes`.
        torch.OutOfMemoryError: not even this fits.
    """
    layers = min(CALIBRATED_LAYERS, shapes.config.get_text_config().num_hidden_layers)
    small = Predictor(run, Shapes(with_layers(shapes.config, layers)), device)
    sizes = step_sizes(run)
    length = min(sizes.sequence_length, CALIBRATED_TOKENS // 2)
    prompt = max(1, length * sizes.prompt_length // sizes.sequence_length)
    probe = StepSizes(1, 2, prompt, max(1, length - prompt), micro_batch_tokens=CALIBRATED_TOKENS)
    predicted = small.predict(probe)
    transient = transient_bytes(predicted.parts["update"])
    resident = predicted.allocated("update") - transient
    context = device.context
    if small.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
    measured = measured_update(small, probe) - resident
    return replace(device, transient=device.transient * measured / transient, context=context)


def measured_update(predictor: Predictor, sizes: StepSizes) -> int:
    """Bytes that torch's allocator held at the highest of two updates with every completion at its longest.

    Adam's moments are there in the second. The twin of `predictor.predict(sizes).allocated("update")`.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    run, device = predictor.run, torch.device(predictor.device.kind)

    def prepare() -> tuple[Policy, PolicyOptimizer, list[PackedBatch]]:
        config, attention, offload = predictor.shapes.config, predictor.attention, run.memory.offload
        policy = random_policy(config, run.model, attention=attention, device=device)
        optimizer = PolicyOptimizer(policy.trainable(), run.optimizer, total_steps=2, on_host=offload)
        return policy, optimizer, random_batches(policy, sizes)

    def updates(made: tuple[Policy, PolicyOptimizer, list[PackedBatch]]) -> None:
        policy, optimizer, batches = made
        for _ in range(2):
            for batch in batches:
                packed_loss(policy, batch, optimizer=optimizer).loss.backward()
            optimizer.step()

    return peak_bytes(prepare, updates, device)


def peak_bytes(prepare: Callable[[], T], work: Callable[[T], object], device: torch.device) -> int:
    """Bytes that torch's allocator held at the highest while `work` ran on what `prepare` made.

    What `prepare` left counts, what was there before it does not. On a CPU torch's profiler reports every
    allocation, those inside operators too.
    """
    gc.collect()  # what others left must not be freed meanwhile
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
    model_config: PretrainedConfig, model: ModelConfig, *, attention: str, device: torch.device
) -> Policy:
    """A policy as `load_policy` makes it, with random weights and no tokenizer."""
    register()
    own = PACKED_ATTENTION if packing_obstacle(model_config) is None else None
    found, packs = random_model(model_config, model, attention=own, device=device), own is not None
    packs &= model.packing == "auto"
    return Policy(found, cast("PreTrainedTokenizerBase", None), attention=attention, packs=packs)


def random_batches(policy: Policy, sizes: StepSizes) -> list[PackedBatch]:
    """The micro-batches of one optimiser step."""
    vocabulary = policy.head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())

    prompts = [draw(sizes.prompt_length) for _ in range(sizes.groups)]
    groups = [number for number in range(sizes.groups) for _ in range(sizes.generations)]
    answers = [draw(sizes.completion_length) for _ in groups]
    table = CompletionTable.of([prompts[number] for number in groups], answers, groups)
    zeros = torch.zeros(len(table.token_ids))
    table = table.with_columns(advantages=zeros + 1, sampler_logprobs=zeros)
    most = sizes.micro_batch_tokens
    return pack(table, max_tokens=most, device=policy.device, shares_prompts=policy.packs)
