"""Join ranks, and exchange objects and tensors between them.

Each exchange names its place. When one rank fails, all raise an error and leave, so that none waits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from grpo_fast.distributed.watch import RankError, Watch

T = TypeVar("T")
_CPU = torch.device("cpu")


@dataclass(eq=False)
class World:
    """The ranks of a run."""

    rank: int = 0
    size: int = 1  # 1: no torch.distributed
    device: torch.device = _CPU  # of this rank
    step: int = 0  # for messages
    watch: Watch | None = None  # None: one rank
    objects: ProcessGroup | None = None  # of `all_succeed`, as a failed rank may leave others in a collective
    launcher: Store | None = None  # of torchrun, which outlives its ranks

    @property
    def is_main(self) -> bool:
        """Return whether this rank writes the run's folder and logs."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.device.type, self.size)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this rank's contiguous part of items that all ranks have; sizes differ by at most one."""
        bounds = [len(items) * rank // self.size for rank in (self.rank, self.rank + 1)]
        return items[slice(*bounds)]

    def begin(self, step: int, seed: int) -> None:
        """Begin a step. Several ranks seed it, as a resumed run may have another number of ranks."""
        self.step = step
        if self.size > 1:
            torch.manual_seed(self.seed(random.Random(f"{seed}/{step}").getrandbits(62)))

    def seed(self, seed: int) -> int:
        """Return a seed for this rank; rank 0 keeps `seed`."""
        return random.Random(f"{seed}/{self.rank}").getrandbits(62) if self.rank else seed

    def mark_started(self, run_dir: Path) -> None:
        """Note in torchrun's store that ranks that it restarts resume from this folder."""
        if self.launcher is not None:
            self.launcher.set(str(run_dir.resolve()), "begun")

    def was_started(self, run_dir: Path) -> bool:
        """Return whether torchrun has restarted the ranks of this run."""
        return self.launcher is not None and self.launcher.check([str(run_dir.resolve())])

    def at(self, place: str) -> AbstractContextManager[None]:
        """Name the place of this rank's collectives for messages; raises as `Watch.at`."""
        return nullcontext() if self.watch is None else self.watch.at(self._during(place))

    def gather_from_all(self, place: str, work: Callable[[], T]) -> list[T]:
        """Return the result of `work` on each rank, in rank order.

        Args:
            place: for messages, the same on all ranks.
            work: may differ between ranks.

        Raises:
            RankError: another rank's work raised, or another rank is elsewhere.
            Exception: as this rank's work.
        """
        with self.all_succeed(place) as results:
            results.append(work())
        return results

    def gather_tensors(self, place: str, work: Callable[[], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Gather tensors by name as `gather_from_all` does, on the CPU."""

        def own() -> dict[str, Tensor]:  # without the rest of a storage that a tensor is a view of
            return {name: tensor.cpu().clone() for name, tensor in work().items()}

        return self.gather_from_all(place, own)

    @contextmanager
    def all_succeed(self, place: str) -> Iterator[list[Any]]:
        """Leave a block only when it has succeeded on all ranks; raises as `gather_from_all`.

        The yielded list of this rank becomes the concatenation of all ranks' lists.
        """
        results: list[Any] = []
        if self.size == 1:
            yield results
            return
        watch = self.watch
        assert watch is not None, "ranks that exchange anything have `joined`"
        place = self._during(place)
        error, text = None, None
        found: list[Any] = [None] * self.size
        with watch.at(place):
            try:
                with watch.work():
                    yield results
            except BaseException as raised:
                error = watch.explained(raised)
                if watch.lost or error is watch.agreed:
                    raise
                results, text = [], watch.fail(error)
            dist.all_gather_object(found, (place, text, results), group=self.objects)
            watch.own.failure = None  # all ranks know it now
            watch.own.exchanges += 1
        problems = [problem for _, problem, _ in found if problem is not None]
        away = [f"rank {rank} is at {there}" for rank, (there, _, _) in enumerate(found) if there != place]
        if problems or away:
            watch.agreed = error or RankError(problems[0] if problems else f"{away[0]}, not at {place}")
            raise watch.agreed
        results[:] = [value for _, _, values in found for value in values]

    def leave(self) -> None:
        """End the exchanges: each rank goes on as a single process."""
        self.gather_from_all("the end", bool)  # else a rank that leaves first would seem lost
        if self.watch is not None:
            self.watch.__exit__()
            self.watch, self.objects, self.size = None, None, 1
            _stop()

    def _during(self, place: str) -> str:
        return f"{place} of step {self.step}" if self.step else place

    def from_main(self, place: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only, and return its result on all ranks."""
        results: list[T | None] = self.gather_from_all(place, work if self.is_main else lambda: None)
        return results[0]  # type: ignore[return-value]

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


SINGLE_PROCESS = World()


@cache
def mesh_of(device_type: str, size: int) -> DeviceMesh:
    """Return the one-dimensional mesh of all ranks."""
    return DeviceMesh(device_type, torch.arange(size))


@contextmanager
def joined(device: torch.device, timeout: timedelta, heartbeat_timeout: float = 300.0) -> Iterator[World]:
    """Join the ranks of torchrun or another launcher, or yield a single process.

    Args:
        device: `cpu`, or `cuda` for the GPU of LOCAL_RANK.
        timeout: of each exchange and of joining.
        heartbeat_timeout: seconds without a heartbeat after which a rank is lost.

    Raises:
        ValueError: `device` names one GPU for all ranks, or no address is set.
        RankError: a rank is missing.
    """
    numbers = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in numbers.items())
    on_gpu = device.type == "cuda"
    if size > 1 and device.index is not None:
        raise ValueError(
            f"model.device = '{device}' is one GPU for all {size} ranks; leave it at auto for the GPU of "
            "each LOCAL_RANK"
        )
    if size > 1 and on_gpu:
        device = torch.device("cuda", local_rank)
    if device.index or (size > 1 and on_gpu):
        torch.cuda.set_device(device)
    if size == 1:
        launcher = _connect(size, rank, timeout) if dist.is_torchelastic_launched() else None
        yield World(device=device, launcher=launcher)
        return
    launcher = _connect(size, rank, timeout)
    # Ranks before a restart by torchrun have left their keys in the store.
    store = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{size}", launcher)
    watch = Watch(store, rank, size, heartbeat_timeout)
    watch.meet(size, timeout)
    group: dict[str, Any] = {"device_id": device} if on_gpu else {}
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        with watch:
            with watch.at("the joining"):
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=timeout, **group
                )
                objects = dist.new_group(backend="gloo", timeout=timeout)
                world = World(rank, size, device, watch=watch, objects=objects, launcher=launcher)
                world.sum(torch.zeros(1, device=device))  # NCCL allocates now, before vLLM takes the memory
            try:
                yield world
            except BaseException as error:
                with suppress(RankError):
                    world.gather_from_all("the end", partial(_raise, error))
                raise
            world.leave()
    finally:
        _stop()


def _connect(size: int, rank: int, timeout: timedelta) -> Store:
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not host or not port:
        raise ValueError(
            f"WORLD_SIZE = {size} without MASTER_ADDR and MASTER_PORT: start the ranks with torchrun, or "
            "set both to where rank 0 can be reached"
        )
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(host, int(port), None, keeps, timeout, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise RankError(f"rank 0 cannot be reached at {host}:{port}: {error}") from error


def _stop() -> None:
    mesh_of.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _raise(error: BaseException) -> None:
    raise error
