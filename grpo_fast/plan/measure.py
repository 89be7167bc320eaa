"""Measured bytes, to hold predictions against: a real update of random weights, watched by the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from grpo_fast.plan.model_shape import random_model
from grpo_fast.plan.sizes import StepSizes
from grpo_fast.plan.trace import textless_policy
from grpo_fast.policy import PackedBatch, Policy, Sample, pack
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
_START = "grpo_fast: watched from here"


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
    samples = [
        Sample(prompt, draw(sizes.completion_length), 1.0, group, sampler_logprobs=logprobs)
        for group, prompt in enumerate(draw(sizes.prompt_length) for _ in range(sizes.groups))
        for _ in range(sizes.generations)
    ]
    return pack(samples, max_tokens=sizes.micro_batch_tokens, device=policy.device)
