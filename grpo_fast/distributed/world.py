"""Exchanges between ranks: each names its place, and an error of one rank is an error of all.

Where work differs between ranks, `gather_from_all` runs it and gives every rank all results. Where one rank
fails, all leave the place, so that none waits for another.
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
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import DistNetworkError, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from grpo_fast.distributed.watch import RankError, Watch

T = TypeVar("T")
_CPU = torch.device("cpu")


@dataclass(eq=False)
class World:
    """The ranks of a run."""

    rank: int = 0  # this process' number
    size: int = 1  # how many there are; 1: no torch.distributed
    device: torch.device = _CPU  # of this rank, where its tensors are exchanged
    step: int = 0  # that is being trained, for messages
    watch: Watch | None = None  # of the other ranks; None: there are none
    # Of `gather_from_all`: a rank may fail where others are in a collective.
    objects: ProcessGroup | None = None
    launcher: Store | None = None  # torchrun's, which outlives its ranks

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's folder and speaks to the user."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh:
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

    def mark_started(self, run_dir: Path) -> None:
        """From here on, ranks that torchrun starts again go on with what is in the folder."""
        if self.launcher is not None:
            self.launcher.set(str(run_dir.resolve()), "begun")

    def was_started(self, run_dir: Path) -> bool:
        """Whether torchrun starts the ranks of this run again, as after the loss of one."""
        return self.launcher is not None and self.launcher.check([str(run_dir.resolve())])

    def at(self, place: str) -> AbstractContextManager[None]:
        """Name the place where this rank takes part in collectives, for the messages of all ranks.

        Raises:
            RankError: instead of a collective's own error; at once if another rank is lost.
        """
        return nullcontext() if self.watch is None else self.watch.at(self._during(place))

    def gather_from_all(self, place: str, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, in rank order.

        Args:
            place: in words, for messages: the same on all ranks.

        Raises:
            RankError: another rank's work raised, or another rank is at another place.
            Exception: as this rank's own work.
        """
        with self.all_succeed(place) as results:
            results.append(work())
        return results

    def gather_tensors(self, place: str, work: Callable[[], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """`gather_from_all` for tensors by name, which are sent as such, and are on the CPU then."""

        def own() -> dict[str, Tensor]:
            return {name: tensor.cpu() for name, tensor in work().items()}

        if self.size == 1:
            return [own()]
        # Of their own memory each, as safetensors asks for.
        packed = self.gather_from_all(place, lambda: save({name: t.clone() for name, t in own().items()}))
        return [*map(load, packed)]

    @contextmanager
    def all_succeed(self, place: str) -> Iterator[list[Any]]:
        """A block of work that has succeeded on all ranks when it is left; raises as `gather_from_all`.

        What this rank puts into the list is there afterwards of every rank, in rank order.
        """
        results: list[Any] = []
        if self.size == 1:
            yield results
            return
        watch = self.watch
        assert watch is not None, "ranks that exchange anything have `joined`"
        place = self._during(place)
        error, told = None, None
        found: list[Any] = [None] * self.size
        with watch.at(place):
            try:
                with watch.work():
                    yield results
            except BaseException as raised:
                error = watch.explained(raised)
                if watch.lost or error is watch.agreed:
                    raise
                results, told = [], watch.fail(error)
            dist.all_gather_object(found, (place, told, results), group=self.objects)
            watch.finished()
        problems = [problem for _, problem, _ in found if problem is not None]
        away = [f"rank {rank} is at {there}" for rank, (there, _, _) in enumerate(found) if there != place]
        if problems or away:
            watch.agreed = error or RankError(problems[0] if problems else f"{away[0]}, not at {place}")
            raise watch.agreed
        results[:] = [value for _, _, values in found for value in values]

    def leave(self) -> None:
        """No rank waits for another any more: each is alone, and goes on as long as it likes."""
        self.gather_from_all("the end", bool)  # a rank that leaves before others would seem lost
        if self.watch is not None:
            self.watch.__exit__()
            self.watch, self.objects, self.size = None, None, 1
            _stop()

    def _during(self, place: str) -> str:
        return f"{place} of step {self.step}" if self.step else place

    def from_main(self, place: str, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone runs it."""
        results: list[T | None] = self.gather_from_all(place, work if self.is_main else lambda: None)
        return results[0]  # type: ignore[return-value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


SINGLE_PROCESS = World()


@cache
def mesh_of(device_type: str, size: int) -> DeviceMesh:
    """All ranks in a row, for tensors of such devices."""
    return DeviceMesh(device_type, torch.arange(size))


@contextmanager
def joined(device: torch.device, timeout: timedelta, heartbeat_timeout: float = 300.0) -> Iterator[World]:
    """Join the ranks that torchrun or another launcher has started, or yield this process alone.

    torchrun ends all ranks when one fails or dies before it joins, and names it.

    Args:
        device: `cpu`, or `cuda` for the GPU of this rank.
        timeout: of every exchange between ranks, and of the joining.
        heartbeat_timeout: seconds without a sign of life after which a rank is lost.

    Raises:
        ValueError: a GPU is named that each rank would take, or no place where the ranks meet.
        RankError: a rank does not come.
    """
    size, rank, local_rank = _numbers()
    if size == 1:
        if device.index:
            torch.cuda.set_device(device)
        yield World(device=device, launcher=_connect(timeout) if dist.is_torchelastic_launched() else None)
        return
    device = _own(device, size, local_rank)
    store = _connect(timeout)
    watch = Watch(_of_attempt(store), rank, size, heartbeat_timeout)
    watch.meet(size, timeout)
    try:
        with watch:
            with watch.at("the joining"):
                world = started(watch, store, device, timeout)
            try:
                yield world
            except BaseException as error:
                with suppress(RankError):
                    world.gather_from_all("the end", partial(_raise, error))
                raise
            world.leave()
    finally:
        _stop()


def _numbers() -> tuple[int, int, int]:
    """Return the number of ranks, this process's rank, and its rank on this host."""
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    size, rank, local_rank = (int(os.environ.get(name, value)) for name, value in alone.items())
    return size, rank, local_rank


def _own(device: torch.device, size: int, local_rank: int) -> torch.device:
    """Return this rank's device."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(
            f"model.device = '{device}' would be the GPU of all {size} ranks; leave it at auto, and each "
            "takes that of its LOCAL_RANK"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _connect(timeout: timedelta) -> Store:
    """Connect to the store that rank 0 or torchrun keeps."""
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    size, rank, _ = _numbers()
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


def _of_attempt(store: Store) -> Store:
    """Separate these ranks' keys from those that ranks before a restart by torchrun left in the store."""
    return PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_numbers()[0]}", store)


def started(watch: Watch, store: Store, device: torch.device, timeout: timedelta) -> World:
    """Create the process groups; all exchanges are possible from here on."""
    on_gpu = device.type == "cuda"
    size, rank, _ = _numbers()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_of_attempt(store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    objects = dist.new_group(backend="gloo", timeout=timeout)
    world = World(rank, size, device, watch=watch, objects=objects, launcher=store)
    world.sum(torch.zeros(1, device=device))  # NCCL takes its memory now: vLLM would leave it none
    return world


def _stop() -> None:
    mesh_of.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _raise(error: BaseException) -> None:
    raise error
