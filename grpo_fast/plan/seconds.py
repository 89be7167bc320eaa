"""Seconds of a step on a GPU with published speeds: an estimate by arithmetic, not measured.

Each completion is taken at its longest, and each product of the head as dense.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from grpo_fast.config import TrainConfig
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.sizes import MicroBatch, StepSizes, Work
from grpo_fast.rollout.config import Part

# What is reached of the published rate of arithmetic, and while decoding of the memory's bandwidth.
REACHED_FLOPS, REACHED_BANDWIDTH = 0.4, 0.6

PCIE_4, PCIE_5 = 25e9, 50e9  # bytes a second as reached by 16 lanes, each way; 5: from capability 9.0 on

SLEEP_SECONDS = 0.2  # of vLLM's falling asleep and waking, a step

FUSED_4_BITS = 4  # rows up to which bitsandbytes multiplies 4-bit weights as they are on every GPU

HOST_SECONDS = {"vllm": 2e-3, "transformers": 7e-4}
"""The least that a decoded token takes: vLLM's scheduler and graph; the launches of one layer."""


def update_seconds(
    run: TrainConfig, shape: ModelShape, device: DeviceBudget, work: MicroBatch | Work
) -> float:
    """Of all epochs and minibatches of a step, whose documents are `work` in `work.count` micro-batches."""
    layers, head = _layer_flops(shape, work.inputs, work.pairs), _head_flops(shape, work.targets)
    recomputed = {True: layers, "offload": layers, "mlp": 2 * shape.active_mlp * work.inputs}
    backward = 1 if run.model.lora is not None else 2  # a frozen weight has no gradient of its own
    passes = 1 + backward + recomputed.get(run.model.gradient_checkpointing, 0) / layers
    products = 3 + shape.head_trained  # the backward forms the logits once more
    forwards = float(run.loss.needs_reference)
    if run.old_logprobs == "recompute":  # by minibatches after the first
        forwards += 1 - 1 / run.minibatches
    flops = run.num_iterations * (passes * layers + products * head) + forwards * (layers + head)
    launches = (run.num_iterations * passes + forwards) * work.count * len(shape.layers)
    # Each micro-batch's gradient is written and read, and its float32 sum is read and written.
    moved = run.num_iterations * work.count * (2 * shape.itemsize + 8) * (shape.narrow + shape.wide)
    computing = max(flops / (REACHED_FLOPS * device.flops), launches * HOST_SECONDS["transformers"])
    if run.model.gradient_checkpointing == "offload":  # inputs leave and come back beside it
        computing = max(computing, 2 * run.num_iterations * shape.inputs(work.inputs) / _host_link(device))
    return computing + moved / (REACHED_BANDWIDTH * device.bandwidth)


def transfer_seconds(
    run: TrainConfig, shape: ModelShape, device: DeviceBudget, offloaded: Collection[Part]
) -> float:
    """Of a step's copies: state to each optimiser step, the reference once; both directions overlap."""
    moments = shape.moments(run.optimizer.kind) * ("optimizer" in offloaded)
    masters = 4 * shape.narrow * ("master" in offloaded)
    steps = run.num_iterations * run.minibatches
    copied = steps * (moments + masters) / device.ranks + shape.bytes * ("reference" in offloaded)
    return copied / _host_link(device)


def _host_link(device: DeviceBudget) -> float:
    return PCIE_5 if device.capability[0] >= 9 else PCIE_4


def rollout_seconds(
    shape: ModelShape, device: DeviceBudget, sizes: StepSizes, engine: str, in_flight: int
) -> float:
    """Prompts through the model once, then a token of each completion in flight at a time.

    It takes as long as reading weights, keys and values, these half-way, or as its products.
    """
    length = sizes.completion_length
    token = partial(token_seconds, shape, device, engine, sizes.prompt_length + length // 2)
    waves, rest = divmod(sizes.completions, in_flight)
    seconds = length * (waves * token(in_flight) + (token(rest) if rest else 0))
    return prefill_seconds(shape, device, sizes) + seconds


def prefill_seconds(shape: ModelShape, device: DeviceBudget, sizes: StepSizes) -> float:
    """Of the prompts' way through the model."""
    tokens, prompt = sizes.prompts * sizes.prompt_length, sizes.prompt_length
    return _layer_flops(shape, tokens, tokens * prompt // 2) / (REACHED_FLOPS * device.flops)


def token_seconds(shape: ModelShape, device: DeviceBudget, engine: str, seen: int, rows: int) -> float:
    """Of the next token of so many completions in flight, each of which sees `seen` tokens."""
    weights = shape.active + shape.vocabulary * shape.hidden
    in_4_bits = 0.5 if rows <= FUSED_4_BITS else 0.5 + 2 * shape.itemsize  # else they are made anew, and read
    read = shape.itemsize * (weights - shape.quantized) + in_4_bits * shape.quantized
    read += rows * shape.kv_bytes(seen)
    computing = 2 * rows * weights / (REACHED_FLOPS * device.flops)
    host = HOST_SECONDS[engine] * (1 if engine == "vllm" else len(shape.layers))
    return max(read / (REACHED_BANDWIDTH * device.bandwidth), computing, host)


def _layer_flops(shape: ModelShape, tokens: int, pairs: int) -> float:
    """Of one forward; attention is two products of as many numbers as a token has, for each pair it sees."""
    return 2 * shape.active * tokens + 4 * shape.hidden * len(shape.layers) * pairs


def _head_flops(shape: ModelShape, targets: int) -> float:
    """Of one of the head's products."""
    return 2 * shape.vocabulary * shape.hidden * targets
