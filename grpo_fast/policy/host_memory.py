"""Tensors in host memory, and their copies on the device."""

from __future__ import annotations

import logging
import mmap
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
ARENA = 16 << 20
"""Bytes of an arena of small tensors. torch would round each tensor's pinned memory to a power of two."""
_ALIGNMENT = 512  # bytes, as torch aligns tensors on a GPU


class PinnedPages(mmap.mmap):
    """Page-locked host memory. RuntimeError if so much cannot be locked."""

    address: int

    def __new__(cls, size: int) -> PinnedPages:
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        page_lock(address, size)
        pages.address = address
        return pages

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():
            page_unlock(self.address)


def page_lock(address: int, size: int) -> None:
    error = torch.cuda.cudart().cudaHostRegister(address, size, 1)  # for all devices
    if int(error):
        with suppress(RuntimeError):  # else the next kernel would report the error
            torch.ones(1, device="cuda")
        raise RuntimeError(f"cudaHostRegister of {size} bytes: error {int(error)}")


def page_unlock(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(address)


class Arenas:
    """Pinned memory without rounding: a large tensor has its own pages, small ones share an arena."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the last arena

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Allocate memory, or raise OSError or RuntimeError if the host has no more."""
        like = torch.empty_like(tensor, device="meta", requires_grad=False)
        size = -(-max(1, like.nbytes) // _ALIGNMENT) * _ALIGNMENT
        if size > ARENA // 2:
            part = torch.frombuffer(PinnedPages(size), dtype=torch.uint8)
        else:
            if size > len(self._rest):
                self._rest = torch.frombuffer(PinnedPages(ARENA), dtype=torch.uint8)
            part, self._rest = self._rest.split([size, len(self._rest) - size])
        return part.view(like.dtype).as_strided(like.shape, like.stride())


ARENAS = Arenas()


def to_host(tensor: Tensor, *, pinned: bool | None = None) -> None:
    """Move the tensor's memory to the host; it stays the same object."""
    tensor.data = host_like(tensor, pinned=pinned).copy_(tensor.detach())


@contextmanager
def waiting_on_host(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Callable[[], None]]:
    """Keep tensors in ordinary host memory, and yield a function that moves them back to `device` early."""
    waiting = [tensor for tensor in tensors if tensor.device.type != "cpu"]

    def back() -> None:
        for tensor in waiting:
            if tensor.device.type == "cpu":
                tensor.data = tensor.detach().to(device)

    try:
        for tensor in waiting:
            to_host(tensor, pinned=False)  # the process would keep pinned memory
        yield back
    finally:
        back()


def host_like(tensor: Tensor, *, pinned: bool | None = None) -> Tensor:
    """Allocate memory like `tensor` on the CPU, for a GPU pinned unless the host has no more of that."""
    if tensor.is_cuda if pinned is None else pinned:
        try:
            return ARENAS.empty_like(tensor)
        except (OSError, RuntimeError) as error:
            _warn_of_ordinary_memory(str(error).partition("\n")[0])
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


@cache  # warns once
def _warn_of_ordinary_memory(error: str) -> None:
    logger.warning("no more pinned memory for the trainer's tensors (%s): their copies are slower", error)


@contextmanager
def on_device(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Copy host tensors to the device, and back on exit.

    The copies are queued on the current stream. Synchronize it before the host reads the tensors.
    """
    hosts = [tensor.data for tensor in tensors]
    move(tensors, [host.to(device, non_blocking=True) for host in hosts])
    try:
        yield
    finally:
        for tensor, host in zip(tensors, hosts, strict=True):
            host.copy_(tensor.detach(), non_blocking=True)
        move(tensors, hosts)


def copies_on(
    device: torch.device, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None
) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Copy host tensors on `stream`, after all work queued so far.

    Returns the copies, and the event to wait for before they are read, or None without a stream.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    homes = [torch.empty_like(tensor, device=device, requires_grad=False) for tensor in tensors]
    with torch.cuda.stream(stream):
        for home, tensor in zip(homes, tensors, strict=True):
            home.copy_(tensor.detach(), non_blocking=True)
    return homes, None if stream is None else stream.record_event()


def move(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Make each tensor, the same object, refer to the memory of its place."""
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes of the GPU in use by all processes; on a CPU, this process's peak memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
