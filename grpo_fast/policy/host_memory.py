"""Tensors in the host's memory: state that visits the device in a step, and layers' inputs between passes."""

from __future__ import annotations

import logging
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**24  # torch keeps free pinned memory for the next step, in sizes rounded to powers of two


def to_host(tensor: Tensor) -> None:
    """Move the content; the tensor stays the same object, and is readable."""
    tensor.data = host_like(tensor).copy_(tensor.detach())


def host_like(tensor: Tensor, *, pinned: bool | None = None) -> Tensor:
    """Empty memory like `tensor` on the CPU; pinned for a GPU, unless the host has no more of that."""
    if tensor.is_cuda if pinned is None else pinned:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as error:
            _warn_of_ordinary_memory(str(error).partition("\n")[0])
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


@cache
def _warn_of_ordinary_memory(error: str) -> None:
    """Once, however many tensors go there."""
    logger.warning(
        "no more pinned memory for the trainer's tensors (%s): they move through ordinary memory, slower",
        error,
    )


@contextmanager
def on_device(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    """Hold tensors of the host on the device; their content goes back to the same host memory.

    All copies are queued on the current stream. Synchronize it before the host reads the tensors.
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
    """Copies of tensors of the host, and the event to wait for before they are read."""
    homes = [torch.empty_like(tensor, device=device, requires_grad=False) for tensor in tensors]
    return homes, copy_beside(stream, homes, [tensor.detach() for tensor in tensors])


def copy_beside(
    stream: torch.cuda.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> torch.cuda.Event | None:
    """Copy after all that is queued so far, and hold up nothing that is queued later.

    Returns:
        The event that the copies are done; None without a stream, where they are already.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()


def wait(event: torch.cuda.Event | None, device: torch.device) -> None:
    """What is queued on the device from now on runs after the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def move(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Each tensor, the same object, is the memory of its place from now on."""
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class LayerInputs:
    """Checkpoints layers, one after the other, whose inputs wait on the host from forward to backward.

    An input leaves while its layer computes, and comes back while the layer behind computes its backward: the
    device holds those of two layers, the host layers x tokens x width of a micro-batch.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: Callable[[], _LayerInput | None] = lambda: None

    def checkpoint(self, layer: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint`; of what it keeps, tensors like `hidden` go to the host."""
        if not torch.is_grad_enabled():
            return layer(hidden, *args)
        self._stream = self._stream or side_stream(hidden.device)
        with saved_tensors_hooks(partial(self._pack, hidden.shape), _unpack):
            return checkpoint(layer, hidden, *args, use_reentrant=False)

    def _pack(self, shape: torch.Size, kept: Tensor) -> Tensor | _LayerInput:
        if kept.shape != shape:
            return kept
        if before := self._newest():
            before.leave()  # the newest is on the device as long as none follows: the backward begins with it
        newest = _LayerInput(kept.detach(), self._stream, self._newest)
        self._newest = weakref.ref(newest)
        return newest


class _LayerInput:
    """One layer's input: on the host, and on the device too while it is copied."""

    def __init__(
        self, home: Tensor, stream: torch.cuda.Stream | None, before: Callable[[], _LayerInput | None]
    ) -> None:
        self._home: Tensor | None = home
        self._moved: torch.cuda.Event | None = None
        self._stream, self._before = stream, before
        self._make = partial(torch.empty, home.shape, dtype=home.dtype, device=home.device)
        self._hosts = [host_like(block) for block in _blocks(home)]
        self._moved = copy_beside(stream, self._hosts, _blocks(home))

    def fetch(self) -> None:
        if self._home is None:
            self._home = self._make()
            self._moved = copy_beside(self._stream, _blocks(self._home), self._hosts)

    def leave(self) -> None:
        """Free its device memory for work queued from now on, which waits for the copy."""
        if self._home is not None:
            wait(self._moved, self._home.device)
            self._home = None

    __del__ = leave  # where no backward came

    def take(self) -> Tensor:
        self.fetch()
        home: Any = self._home
        self.leave()
        if before := self._before():
            before.fetch()
        return home


def _unpack(kept: Tensor | _LayerInput) -> Tensor:
    return kept.take() if isinstance(kept, _LayerInput) else kept


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.reshape(-1).split(BLOCK_BYTES // tensor.itemsize)


def bytes_in_use(device: torch.device) -> int:
    """Bytes of the GPU in use by all processes; on a CPU, the peak resident memory of this one."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
