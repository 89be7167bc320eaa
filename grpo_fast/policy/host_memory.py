"""Tensors that live in the host's memory, and visit the device a few at a time."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def to_host(tensor: Tensor) -> None:
    """Move the content; the tensor stays the same object, and is readable."""
    tensor.data = host_like(tensor).copy_(tensor.detach())


def host_like(tensor: Tensor, *, pinned: bool | None = None) -> Tensor:
    """Empty memory like `tensor` on the CPU; pinned for a GPU, unless the host has no more of that."""
    if tensor.is_cuda if pinned is None else pinned:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        except RuntimeError as error:
            _tell_of_ordinary_memory(str(error).partition("\n")[0])
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


@cache
def _tell_of_ordinary_memory(error: str) -> None:
    """Once, however many tensors go there."""
    logger.warning(
        "no more pinned memory for the trainer's tensors (%s): they move through ordinary memory, slower",
        error,
    )


def visits(groups: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[int]:
    """Each group's index, while its tensors are on the device; then they go to the host as they became.

    The next group comes and the last one leaves meanwhile: the device holds three groups at most.
    """
    inward, outward = side_stream(device), side_stream(device)
    leaving: list[torch.cuda.Event] = []
    coming = copies_on(device, groups[0], inward) if groups else ([], None)
    for index, group in enumerate(groups):
        here, arrived = coming
        if len(leaving) > 1:
            leaving.pop(0).synchronize()  # else this loop, far ahead of the device, would fetch everything
        coming = copies_on(device, groups[index + 1], inward) if index + 1 < len(groups) else ([], None)
        if arrived is not None:
            torch.cuda.current_stream(device).wait_event(arrived)
        hosts = [host_like(tensor) if tensor.is_cuda else tensor.data for tensor in group]
        move(group, here)
        yield index
        with beside(outward):
            for host, home in zip(hosts, here, strict=True):
                host.copy_(home, non_blocking=True)
                if outward is not None:
                    home.record_stream(outward)
        if outward is not None:
            leaving.append(outward.record_event())
        move(group, hosts)
    if outward is not None:
        outward.synchronize()


def copies_on(
    device: torch.device, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None
) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Copies of tensors of the host, and the event to wait for before they are read."""
    homes = [torch.empty_like(tensor, device=device, requires_grad=False) for tensor in tensors]
    with beside(stream):
        for home, tensor in zip(homes, tensors, strict=True):
            home.copy_(tensor.detach(), non_blocking=True)
    return homes, None if stream is None else stream.record_event()


def move(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """Each tensor, the same object, is the memory of its place from now on."""
    for tensor, place in zip(tensors, places, strict=True):
        tensor.data = place


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Copies in here see what is queued so far, and hold up nothing that is queued later."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def bytes_in_use(device: torch.device) -> int:
    """Of the GPU, by whomever: what sleeps does not count. On a CPU, of the process at its highest."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
