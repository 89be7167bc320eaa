"""Measured bytes, to hold predictions against: a real update of random weights, watched by the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from grpo_fast.plan.model_shape import random_model
from grpo_fast.plan.setup import Workload
from grpo_fast.policy import PackedBatch, Policy, PolicyOptimizer, Sample, pack
from grpo_fast.policy.attention import PACKED_ATTENTION, register
from grpo_fast.policy.config import ModelConfig, OptimizerConfig
from grpo_fast.update import packed_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig


T = TypeVar("T")
_START = "grpo_fast: watched from here"


@dataclass(frozen=True)
class Measured:
    """What two updates took, so that Adam's moments are there in the second."""

    peak: int  # bytes held by torch's allocator at the highest, weights and optimizer included
    inputs: int  # tokens of the largest micro-batch
    targets: int
    micro_batches: int


def measure_update(
    model_config: PretrainedConfig,
    model: ModelConfig,
    work: Workload,
    *,
    attention: str,
    device: torch.device | str,
) -> Measured:
    """Forward, loss, backward and step of random weights and tokens, every completion at its longest.

    The twin of `Predictor.predict(work).allocated("update")`. Nothing else may allocate meanwhile.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    device = torch.device(device)
    sizes: list[int] = []

    def prepare() -> tuple[Policy, PolicyOptimizer, list[PackedBatch]]:
        policy = random_policy(model_config, model, attention=attention, device=device)
        optimizer = PolicyOptimizer(policy.trainable(), OptimizerConfig(), total_steps=2)
        batches = random_batches(policy, work)
        sizes.extend((batches[0].input_ids.numel(), batches[0].targets.numel(), len(batches)))
        return policy, optimizer, batches

    def updates(made: tuple[Policy, PolicyOptimizer, list[PackedBatch]]) -> None:
        policy, optimizer, batches = made
        for _ in range(2):
            for batch in batches:
                backward(policy, batch, optimizer)
            optimizer.step()

    return Measured(peak_bytes(prepare, updates, device), *sizes)


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
    implementation = attention if attention == "flash_attention_2" else PACKED_ATTENTION
    found = random_model(model_config, model, attention=implementation, device=device)
    return Policy(found, tokenizer=None, attention=attention)


def random_batches(policy: Policy, work: Workload) -> list[PackedBatch]:
    """The micro-batches of one optimiser step."""
    vocabulary = policy.head.weight.shape[0]
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (length,), generator=generator).tolist())

    length = work.completion_length
    samples = []
    for group in range(-(-work.prompts // work.minibatches)):
        prompt = draw(work.prompt_length)
        samples += [
            Sample(prompt, draw(length), 1.0, group, sampler_logprobs=(0.0,) * length)
            for _ in range(work.generations)
        ]
    return pack(
        samples,
        max_tokens=work.micro_batch_tokens,
        share_prompts=policy.shares_prompts,
        device=policy.device,
    )


def backward(policy: Policy, batch: PackedBatch, optimizer: PolicyOptimizer) -> None:
    """As the trainer does it, with the default loss."""
    head, hidden = policy.head, policy.hidden_states(batch)
    packed_loss(head, hidden, batch, weight_grad=optimizer.gradient_of(head.weight)).loss.backward()
