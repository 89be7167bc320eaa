"""Seconds that ranks exchange tensors in a step: arithmetic, with none of it hidden behind other work."""

from __future__ import annotations

from grpo_fast.config import TrainConfig
from grpo_fast.distributed.shards import BUCKET
from grpo_fast.plan.devices import DeviceBudget
from grpo_fast.plan.model_shape import ModelShape
from grpo_fast.plan.sizes import MicroBatch, Work

NETWORK = 50e9  # bytes a second of each GPU to other nodes, each way: 400 Gb/s. Assumed.
REACHED_LINK = 0.8  # of the published rate. Assumed.
HOP = 5e-6  # seconds until a rank has the first byte of the one before it in the ring. Assumed.


def collective_seconds(device: DeviceBudget, size: float, calls: float) -> float:
    """Of gathers or reduce-scatters of `size` bytes in all, in rings through all ranks.

    Each GPU of a node has a ring that leaves the node through its own network card.
    """
    others = device.ranks - 1
    if not others:
        return 0.0
    rate = device.link if device.ranks <= device.node else min(device.link, device.node * NETWORK)
    return size * others / device.ranks / (REACHED_LINK * rate) + calls * others * HOP


def update_exchange(
    run: TrainConfig, shape: ModelShape, device: DeviceBudget, batch: MicroBatch | Work
) -> float:
    """Of all epochs and minibatches of a step, each of `batch.count` micro-batches.

    Gradients travel as float32, weights and hidden states as they are.
    """
    trained, steps = shape.narrow + shape.wide, run.num_iterations * run.minibatches
    if run.distributed.mode != "shard":
        weights = shape.itemsize * shape.narrow + 4 * shape.wide
        return collective_seconds(
            device, steps * (4 * trained + weights), 2 * steps * (1 + 4 * trained // BUCKET)
        )
    table = shape.parameters.get("head", 0)  # tied, it is the embedding's
    others = shape.bytes - shape.itemsize * table
    head = (shape.itemsize + 4 * shape.head_trained) * table
    if run.distributed.head == "sharded":
        # Gathered, then their gradient all-reduced, which is twice as much.
        head = 3 * shape.itemsize * shape.hidden * batch.targets * device.ranks
    size: float = 2 * others + 4 * (trained - table * shape.head_trained) + head
    calls = 3.0 * (len(shape.layers) + 2)  # a layer's weights twice and its gradient; embedding and head
    forwards = run.loss.needs_reference + (run.old_logprobs == "recompute") * (1 - 1 / run.minibatches)
    size, calls = (
        size * run.num_iterations + forwards * shape.bytes,
        calls * (run.num_iterations + forwards / 3),
    )
    return collective_seconds(
        device, run.minibatches * batch.count * size, run.minibatches * batch.count * calls
    )


def sync_seconds(run: TrainConfig, shape: ModelShape, device: DeviceBudget) -> float:
    """Of the weights' way to the engines of mode shard, tensor by tensor."""
    sharded = run.distributed.mode == "shard"
    return collective_seconds(device, sharded * shape.bytes, sharded * shape.tensors)
