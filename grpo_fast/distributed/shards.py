"""What each rank holds: rows of tensors, summed and copied in few exchanges, and work of even cost.

A tensor is dealt by its first dimension in equal parts, the last ones shorter or empty: the layout of FSDP2
and of DTensor's `Shard(0)`, so that a checkpoint of one is one of the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
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

BUCKET = 2**26  # bytes of one exchange: small tensors wait for each other


def rows_of(tensor: Tensor, world: World) -> Tensor:
    """What of a tensor is this rank's: a view. All of it where there is one rank."""
    if world.size == 1 or isinstance(tensor, DTensor):
        return local(tensor)
    tensor = tensor.detach()
    height = -(-len(tensor) // world.size)
    start = min(len(tensor), height * world.rank)
    return tensor[start : start + height]


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, detached, the same memory; any other tensor as it is."""
    return cast("Any", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows, detached: of a sharded tensor a copy that all ranks make together, of another its memory."""
    tensor = tensor.detach()
    return cast("Any", tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def as_sharded(rows: Tensor, shape: torch.Size, world: World) -> Tensor:
    """This rank's `rows` as part of a tensor of `shape` that is dealt over all ranks."""
    if world.size == 1:
        return rows
    stride = torch.empty(shape, device="meta").stride()
    mesh = mesh_of(rows.device.type, world.size)  # not the device's where state lives on the host
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def reduce_scatter(tensors: Sequence[Tensor], world: World) -> list[Tensor]:
    """This rank's rows of each tensor's sum over all ranks, in memory of their own."""
    found = []
    for bucket in _buckets(tensors):
        blocks = [_blocks(tensor, world) for tensor in bucket]
        flat = blocks[0].contiguous() if len(blocks) == 1 else torch.cat(blocks, 1)
        own = flat.new_empty(flat.shape[1])
        _reduce_scatter(own, flat.view(-1))
        for tensor, part in zip(bucket, own.split([block.shape[1] for block in blocks]), strict=True):
            rows = rows_of(tensor, world)
            found.append(part[: rows.numel()].view(rows.shape))
    return found


@torch.no_grad()
def all_gather(tensors: Sequence[Tensor], world: World) -> None:
    """Each tensor becomes that of every rank's rows, in place; each rank's own are as they should be."""
    for bucket in _buckets(tensors):
        own = [_blocks(tensor, world)[world.rank] for tensor in bucket]
        flat = torch.cat(own)
        if len(bucket) == 1 and bucket[0].numel() == world.size * len(flat) and bucket[0].is_contiguous():
            _all_gather(bucket[0].view(-1), flat)  # a large one, of which there is no room for a second
            continue
        whole = flat.new_empty(world.size, len(flat))
        _all_gather(whole.view(-1), flat)
        for tensor, part in zip(bucket, whole.split([len(block) for block in own], 1), strict=True):
            tensor.copy_(part.reshape(-1)[: tensor.numel()].view(tensor.shape))


def _blocks(tensor: Tensor, world: World) -> Tensor:
    """(ranks, numbers of each), the last rows padded with zeros; the same memory where none are missing."""
    rows = tensor.reshape(len(tensor), -1)
    missing = -len(rows) % world.size
    return (F.pad(rows, (0, 0, 0, missing)) if missing else rows).view(world.size, -1)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to `BUCKET` bytes."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices into `costs` in `parts` sets of nearly equal sums (Karmarkar and Karp 1982, for k sets).

    The two partitions whose own sets differ most are joined, the heaviest set of one with the lightest of the
    other, until one partition is left. The same costs give the same sets.
    """
    if not costs:
        return [[] for _ in range(parts)]
    # (minus the difference of the heaviest and lightest set, a number that decides ties, sets by falling sum)
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
