"""Seconds of a step on GPUs with published speeds: an estimate by arithmetic, not measured.

Each completion is taken at its longest, and each product of the head as dense; no communication between ranks
is hidden behind other work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_fast.config.schema import TrainConfig
from grpo_fast.distributed.shards import BUCKET
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.sizes import MicroBatch, StepSizes

if TYPE_CHECKING:
    from grpo_fast.plan.prediction import Predictor

# What is reached of the published rates of arithmetic, of the memory while decoding, and of links. Assumed.
REACHED_FLOPS, REACHED_BANDWIDTH, REACHED_LINK = 0.4, 0.6, 0.8

PCIE_4, PCIE_5 = 25e9, 50e9  # bytes a second as reached by 16 lanes, each way; 5: from capability 9.0 on
NETWORK = 50e9  # bytes a second of each GPU to other nodes, each way: 400 Gb/s. Assumed.
HOP = 5e-6  # seconds until a rank has the first byte of the one before it in the ring. Assumed.

SLEEP_SECONDS = 0.2  # of vLLM's falling asleep and waking, a step

FUSED_4_BITS = 4  # rows up to which bitsandbytes multiplies 4-bit weights as they are on every GPU

# How often peft reads or writes each number of experts in one tensor: their sums with what adapters add are
# made twice in a forward, and their gradient is written, and read for both factors.
SUMMING, GRADIENT = 4, 3

LAYER_SECONDS = 7e-4  # the least that a layer takes: its launches


def update_seconds(of: Predictor, work: MicroBatch) -> float:
    """Of all epochs and minibatches of a step, whose documents are `work` in `work.count` micro-batches."""
    run, shape, device = of.run, of.shape, of.timed_on
    layers = _layer_flops(shape, work.inputs, work.pairs)
    head = 2 * shape.vocabulary * shape.hidden * work.targets  # of one of its products
    recomputed = {True: layers, "offload": layers, "mlp": 2 * shape.active_mlp * work.inputs}
    backward = 1 if run.model.lora is not None else 2  # a frozen weight has no gradient of its own
    passes = 1 + backward + recomputed.get(run.model.gradient_checkpointing, 0) / layers
    products = 3 + shape.head_trained  # the backward forms the logits once more
    forwards = _forwards_alone(run)
    flops = run.num_iterations * (passes * layers + products * head) + forwards * (layers + head)
    launches = (run.num_iterations * passes + forwards) * work.count * shape.depth
    # Each micro-batch's gradient is written and read, and its float32 sum is read and written.
    moved = run.num_iterations * work.count * (2 * shape.itemsize + 8) * shape.trained
    if summed := sum(shape.plain.merged):  # experts under adapters: a gradient of each sum, and its way
        flops += run.num_iterations * 2 * shape.active_mlp * work.inputs
        often = SUMMING * (passes - backward) + GRADIENT
        moved += run.num_iterations * work.count * often * summed
    computing = max(flops / (REACHED_FLOPS * device.flops), launches * LAYER_SECONDS)
    if run.model.gradient_checkpointing == "offload":  # inputs leave and come back beside it
        computing = max(computing, 2 * run.num_iterations * shape.inputs(work.inputs) / _host_link(device))
    return computing + moved / (REACHED_BANDWIDTH * device.bandwidth)


def transfer_seconds(of: Predictor) -> float:
    """Of a step's copies: state to each optimiser step, the reference once; both directions overlap."""
    run, shape, offloaded = of.run, of.shape, of.offloaded
    moments = shape.moments(run.optimizer.kind) * ("optimizer" in offloaded)
    masters = 4 * shape.params_16bit * ("master" in offloaded)
    steps = run.num_iterations * run.minibatches
    copied = steps * (moments + masters) / of.device.ranks + shape.bytes * ("reference" in offloaded)
    return copied / _host_link(of.timed_on)


def rollout_seconds(of: Predictor, sizes: StepSizes) -> float:
    """Prompts through the model once, then a token of each completion in flight at a time.

    It takes as long as reading weights, keys and values, these half-way, or as its products.
    """
    length, in_flight = sizes.completion_length, of.engine_price(sizes).rows
    seen, (waves, rest) = sizes.prompt_length + length // 2, divmod(sizes.completions, in_flight)
    token = waves * token_seconds(of, seen, in_flight) + (token_seconds(of, seen, rest) if rest else 0)
    prompts = sizes.prompts * sizes.prompt_length
    prefill = _layer_flops(of.shape, prompts, prompts * sizes.prompt_length // 2)
    return prefill / (REACHED_FLOPS * of.timed_on.flops) + length * token


def token_seconds(of: Predictor, seen: int, rows: int) -> float:
    """Of the next token of so many completions in flight, each of which sees `seen` tokens."""
    shape, device = of.shape, of.timed_on
    weights = shape.active + shape.vocabulary * shape.hidden
    quantized = shape.quantized * of.weights.shared  # an engine's own copy is in full precision
    in_4_bits = 0.5 if rows <= FUSED_4_BITS else 0.5 + 2 * shape.itemsize  # else they are made anew, and read
    read = shape.itemsize * (weights - quantized) + in_4_bits * quantized
    read += rows * shape.kv_bytes(seen)
    computing = 2 * rows * weights / (REACHED_FLOPS * device.flops)
    host = of.engine.token_seconds + of.engine.layer_seconds * shape.depth
    return max(read / (REACHED_BANDWIDTH * device.bandwidth), computing, host)


def update_exchange(of: Predictor, work: MicroBatch) -> float:
    """Between ranks, of all epochs and minibatches of a step, each of `work.count` micro-batches.

    Gradients travel as float32, weights and hidden states as they are.
    """
    run, shape, device = of.run, of.shape, of.timed_on
    trained, steps = shape.trained, run.num_iterations * run.minibatches
    if run.distributed.mode != "shard":
        weights = shape.itemsize * shape.params_16bit + 4 * shape.params_32bit
        buckets = 1 + 4 * trained // BUCKET
        return _collective_seconds(device, steps * (4 * trained + weights), 2 * steps * buckets)
    table = shape.parameters.get("head", 0)  # tied, it is the embedding's
    others = shape.bytes - shape.itemsize * table
    head = (shape.itemsize + 4 * shape.head_trained) * table
    size: float = 2 * others + 4 * (trained - table * shape.head_trained) + head
    calls = 3.0 * (shape.depth + 2)  # a layer's weights twice and its gradient; embedding and head
    forwards = _forwards_alone(run)
    size = size * run.num_iterations + forwards * shape.bytes
    calls *= run.num_iterations + forwards / 3
    batches = run.minibatches * work.count
    return _collective_seconds(device, batches * size, batches * calls)


def sync_seconds(of: Predictor) -> float:
    """Of the weights' way to the engines of mode shard, tensor by tensor."""
    return _collective_seconds(of.timed_on, of.sharded * of.shape.bytes, of.sharded * of.shape.tensors)


def _collective_seconds(device: DeviceBudget, size: float, calls: float) -> float:
    """Of gathers or reduce-scatters of `size` bytes in all, in rings through all ranks.

    Each GPU of a node has a ring that leaves the node through its own network card.
    """
    others = device.ranks - 1
    if not others:
        return 0.0
    rate = device.link if device.ranks <= device.node else min(device.link, device.node * NETWORK)
    return size * others / device.ranks / (REACHED_LINK * rate) + calls * others * HOP


def _forwards_alone(run: TrainConfig) -> float:
    """Of a step without a backward: the reference's, and the old policy's for minibatches after the first."""
    return run.loss.needs_reference + (run.old_logprobs == "recompute") * (1 - 1 / run.minibatches)


def _host_link(device: DeviceBudget) -> float:
    return PCIE_5 if device.capability[0] >= 9 else PCIE_4


def _layer_flops(shape: ModelShape, tokens: int, pairs: int) -> float:
    """Of one forward; attention is two products of as many numbers as a token has, for each pair it sees."""
    return 2 * shape.active * tokens + 4 * shape.hidden * shape.depth * pairs
