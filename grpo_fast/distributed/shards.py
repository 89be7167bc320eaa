"""Shard tensors by rows over ranks, and balance work.

Parts of the first dimension are equal, the last ones shorter or empty: the layout of FSDP2 and of DTensor's
`Shard(0)`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from grpo_fast.distributed.world import World, mesh_of

# Since torch 2.13 under other names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rows_of(tensor: Tensor, world: World) -> Tensor:
    """Return a view of this rank's rows of a tensor."""
    if world.size == 1 or isinstance(tensor, DTensor):
        return local(tensor)
    tensor = tensor.detach()
    height = -(-len(tensor) // world.size)
    start = min(len(tensor), height * world.rank)
    return tensor[start : start + height]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, detached, without a copy; any other tensor as it is."""
    return cast("Any", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all rows, detached: of a sharded tensor a copy, in a collective."""
    tensor = tensor.detach()
    return cast("Any", tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def as_sharded(rows: Tensor, shape: torch.Size, world: World) -> Tensor:
    """Return this rank's `rows` as part of a tensor of `shape` that is sharded over all ranks."""
    if world.size == 1:
        return rows
    stride = torch.empty(shape, device="meta").stride()
    mesh = mesh_of(rows.device.type, world.size)  # not the device's where state lives on the host
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def reduce_scatter(tensors: Sequence[Tensor], world: World) -> list[Tensor]:
    """Sum tensors over all ranks, and return copies of this rank's rows."""
    found = []
    for tensor in tensors:
        blocks = _blocks(tensor, world).contiguous()
        own = blocks.new_empty(blocks.shape[1])
        _reduce_scatter(own, blocks.view(-1))
        rows = rows_of(tensor, world)
        found.append(own[: rows.numel()].view(rows.shape))
    return found


@torch.no_grad()
def all_gather(tensors: Sequence[Tensor], world: World) -> None:
    """All-gather row shards in place. On entry only this rank's rows are valid."""
    for tensor in tensors:
        own = _blocks(tensor, world)[world.rank].clone()
        if tensor.is_contiguous() and tensor.numel() == world.size * len(own):
            _all_gather(tensor.view(-1), own)
        else:
            gathered = own.new_empty(world.size * len(own))
            _all_gather(gathered, own)
            tensor.copy_(gathered[: tensor.numel()].view(tensor.shape))


def _blocks(tensor: Tensor, world: World) -> Tensor:
    """Return (ranks, elements of each), zero-padded; without a copy if no rows are missing."""
    rows = tensor.reshape(len(tensor), -1)
    missing = -len(rows) % world.size
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).view(world.size, -1)


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split the indices of `costs` into sets of nearly equal sums (Karmarkar and Karp 1982, for k sets).

    The two partitions with the largest differences are joined, the heaviest set of one with the lightest of
    the other, until one partition is left.
    """
    if not costs:
        return [[] for _ in range(parts)]
    # (minus the difference of heaviest and lightest set, a tie breaker, sets by descending sum)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = [
        (-cost, i, [(cost, [i]), *((0.0, []) for _ in range(parts - 1))]) for i, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, own + other) for (a, own), (b, other) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [sorted(members) for _, members in heap[0][2]]
