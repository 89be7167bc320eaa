"""Seconds of a step on a GPU with published speeds: an estimate by arithmetic, not measured.

Each completion is taken at its longest, each product of the head as dense, and what vLLM hides or the
sparse backward leaves out is not taken off.
"""

from __future__ import annotations

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import Speed
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.sizes import MicroBatch, StepSizes

REACHED_FLOPS = 0.4
"""Of the published 16-bit rate in the update and in a prefill."""

REACHED_BANDWIDTH = 0.6
"""Of the published memory bandwidth while decoding."""

HOST_SECONDS = {"vllm": 2e-3, "transformers": 7e-4}
"""Of one decoded token of all completions in flight, whatever its size: of a graph and its scheduler, and of
one layer's launches."""


def update_seconds(run: TrainConfig, shape: ModelShape, speed: Speed, work: MicroBatch) -> float:
    """Of all epochs and minibatches of a step.

    Args:
        work: all of the step's documents.
    """
    layers, head = _layer_flops(shape, work.inputs, work.squares), _head_flops(shape, work.targets)
    weights = 1 if run.model.lora is not None else 2  # a frozen weight has no gradient of its own
    passes = 1 + weights + run.model.gradient_checkpointing
    products = 3 + shape.head_trained  # the backward forms the logits once more
    forwards = float(run.loss.needs_reference)
    if run.old_logprobs == "recompute":  # by minibatches after the first
        forwards += 1 - 1 / run.minibatches
    flops = run.num_iterations * (passes * layers + products * head) + forwards * (layers + head)
    return flops / (REACHED_FLOPS * speed.flops)


def rollout_seconds(shape: ModelShape, speed: Speed, sizes: StepSizes, engine: str, in_flight: int) -> float:
    """Prompts through the model once, then a token of every completion in flight at a time.

    A token takes as long as reading the weights and, half-way, keys and values, or as its products.
    """
    prompt, length = sizes.prompt_length, sizes.completion_length
    prefill = _layer_flops(shape, sizes.prompts * prompt, sizes.prompts * prompt**2)
    read = shape.itemsize * (shape.active + shape.vocabulary * shape.hidden)
    read += in_flight * shape.kv_bytes(prompt + length // 2)
    products = in_flight * 2 * (shape.active + shape.vocabulary * shape.hidden)
    computing = REACHED_FLOPS * speed.flops
    host = HOST_SECONDS[engine] * (1 if engine == "vllm" else len(shape.layers))
    token = max(read / (REACHED_BANDWIDTH * speed.bandwidth), products / computing, host)
    return prefill / computing + -(-sizes.completions // in_flight) * length * token


def _layer_flops(shape: ModelShape, tokens: int, squares: int) -> float:
    """Of one forward; a token attends to half of its document on average."""
    return 2 * shape.active * tokens + 2 * shape.hidden * len(shape.layers) * squares


def _head_flops(shape: ModelShape, targets: int) -> float:
    """Of one of the head's products."""
    return 2 * shape.vocabulary * shape.hidden * targets
