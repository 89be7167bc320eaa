"""What ranks agree on, they agree on here: each exchange names its place, and an error of one is one of all.

Every rank runs the same program. Where work differs between ranks, `together` runs it and gives every rank
all results; where one rank fails, all leave the place, so that none waits for another that is elsewhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}  # what torchrun would set


class RankError(RuntimeError):
    """Another rank failed, or is at another place."""


@dataclass(eq=False)
class World:
    """The ranks of a run.

    Attributes:
        rank: this process' number.
        size: how many there are; 1: no torch.distributed.
        device: of this rank, where its tensors are exchanged.
        step: that is being trained, for messages.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    step: int = 0

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's folder and speaks to the user."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row."""
        return mesh_of(self.device.type, self.size)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of what all have: contiguous, in rank order, equal but for one."""
        bounds = [len(items) * rank // self.size for rank in (self.rank, self.rank + 1)]
        return items[slice(*bounds)]

    def begin(self, step: int, seed: int) -> None:
        """Of several ranks, what a step draws follows from the step: a resumed run may have other ranks."""
        self.step = step
        if self.size > 1:
            torch.manual_seed(self.seed(random.Random(f"{seed}/{step}").getrandbits(62)))

    def seed(self, seed: int) -> int:
        """One of this rank's own; rank 0's is the same."""
        return random.Random(f"{seed}/{self.rank}").getrandbits(62) if self.rank else seed

    def together(self, place: str, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, in rank order.

        Args:
            place: in words, for messages: the same on all ranks.

        Raises:
            RankError: another rank's work raised, or another rank is at another place.
            Exception: as this rank's own work.
        """
        if self.size == 1:
            return [work()]
        place = f"{place} of step {self.step}"
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        told = None if error is None else f"{type(error).__name__}: {error}"
        found: list[tuple[str, str | None, T]] = [None] * self.size  # type: ignore[list-item]
        try:
            dist.all_gather_object(found, (place, told, result))
        except RuntimeError as lost:
            raise error or RankError(f"{place}: the ranks lost each other: {lost}") from lost
        if error is not None:
            raise error
        for rank, (where, problem, _) in enumerate(found):
            if problem is not None:
                raise RankError(f"rank {rank} stopped at {where}: {problem}")
            if where != place:
                raise RankError(f"rank {rank} is at {where!r}, and rank {self.rank} at {place!r}")
        return [value for _, _, value in found]

    def agreed(self, place: str, work: Callable[[], T]) -> T:
        """What `work` returns on this rank, once it has succeeded on all."""
        results: list[T] = []
        self.together(place, lambda: results.append(work()))
        return results[0]

    def from_lead(self, place: str, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone runs it."""
        results: list[T | None] = self.together(place, work if self.leads else lambda: None)
        return results[0]  # type: ignore[return-value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


ALONE = World()


@cache
def mesh_of(device_type: str, size: int) -> DeviceMesh:
    """All ranks in a row, for tensors of such devices."""
    return DeviceMesh(device_type, torch.arange(size))


@contextmanager
def joined(device: torch.device, timeout: timedelta) -> Iterator[World]:
    """The ranks that torchrun has started, or this process alone.

    Args:
        device: `cpu`, or `cuda` for the GPU of this rank.
        timeout: of every exchange between ranks.

    Raises:
        ValueError: a GPU is named that each rank would take.
    """
    size, rank, local_rank = (int(os.environ.get(name, d)) for name, d in _ALONE.items())
    if size == 1:
        yield World(device=device)
        return
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(
                f"model.device = '{device}' would be the GPU of all {size} ranks; leave it at auto, and each "
                "takes that of its LOCAL_RANK"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout)
    try:
        yield World(rank, size, device)
    finally:
        mesh_of.cache_clear()
        if dist.is_initialized():
            dist.destroy_process_group()
