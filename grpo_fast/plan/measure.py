"""Measured bytes, to hold predictions against: a real update of random weights, watched by the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import CUDA_CONTEXT, DeviceBudget
from grpo_fast.plan.model_shape import random_model, with_layers
from grpo_fast.plan.prediction import Calibration, Predictor, transient_bytes
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.trace import Traces, textless_policy
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample, pack
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.config import ModelConfig
from grpo_fast.update import packed_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
CALIBRATED_LAYERS = 4  # of the model: its layers repeat
CALIBRATED_TOKENS = 4096
_START = "grpo_fast: watched from here"


def calibrate(
    config: TrainConfig, model: PretrainedConfig, device: DeviceBudget, sizes: StepSizes
) -> Calibration:
    """Corrections for predictions of a run, from an update of a few of its layers on this machine's device.

    Resident bytes (weights, optimizer) are known exactly; the correction is for the transient ones. On a GPU
    the bytes that the process takes beside torch's allocator are measured too.

    Args:
        device: this machine's.
        sizes: completions are shortened to a micro-batch of 4096 tokens, one group of two.

    Raises:
        ValueError: the device is a GPU, and there is none here.
        torch.OutOfMemoryError: not even this fits.
    """
    on_gpu = device.kind == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"a calibration for {device.name} needs it, and torch finds no CUDA device here")
    layers = min(CALIBRATED_LAYERS, model.get_text_config().num_hidden_layers)
    small = Predictor(config, Traces(with_layers(model, layers)), device)
    length = min(sizes.sequence_length, CALIBRATED_TOKENS // 2)
    prompt = max(1, length * sizes.prompt_length // sizes.sequence_length)
    probe = StepSizes(1, 2, prompt, max(1, length - prompt), micro_batch_tokens=CALIBRATED_TOKENS)
    predicted = small.predict(probe)
    transient = transient_bytes(predicted.parts["update"])
    resident = predicted.allocated("update") - transient
    context = CUDA_CONTEXT
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
    return Calibration((measure_update(small, probe) - resident) / transient, context)


def measure_update(predictor: Predictor, sizes: StepSizes) -> int:
    """Bytes held by torch's allocator at the highest, weights and optimizer included.

    Two updates of random weights and tokens, every completion at its longest: Adam's moments are there in
    the second. The twin of `predictor.predict(sizes).allocated("update")`; nothing else may allocate
    meanwhile.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    device = torch.device(predictor.device.kind)

    def prepare() -> tuple[Policy, PolicyOptimizer, list[PackedBatch]]:
        config, run = predictor.traces.config, predictor.run
        policy = random_policy(config, run.model, attention=predictor.attention, device=device)
        offload = run.memory.offload
        optimizer = PolicyOptimizer(policy.trainable(), run.optimizer, total_steps=2, on_host=offload)
        return policy, optimizer, random_batches(policy, sizes)

    def updates(made: tuple[Policy, PolicyOptimizer, list[PackedBatch]]) -> None:
        policy, optimizer, batches = made
        for _ in range(2):
            for batch in batches:
                head, hidden = policy.head, policy.hidden_states(batch)
                into = optimizer.gradient_of(head.weight)
                packed_loss(head, hidden, batch, weight_grad=into).loss.backward()
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
    found = random_model(model_config, model, attention=PACKED_ATTENTION, device=device)
    return textless_policy(found, attention)


def random_batches(policy: Policy, sizes: StepSizes) -> list[PackedBatch]:
    """The micro-batches of one optimiser step."""
    vocabulary = policy.head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())

    logprobs = (0.0,) * sizes.completion_length
    samples = []
    for group in range(sizes.groups):
        prompt = draw(sizes.prompt_length)
        samples += [
            Sample(prompt, draw(sizes.completion_length), 1.0, group, sampler_logprobs=logprobs)
            for _ in range(sizes.generations)
        ]
    return pack(
        samples,
        max_tokens=sizes.micro_batch_tokens,
        device=policy.device,
    )
