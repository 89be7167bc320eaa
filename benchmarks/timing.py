"""Time and memory of one call, and how samples are summed up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import host_memory

_COPY_BYTES = {"cuda": 1 << 29, "cpu": 1 << 25}


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements, milliseconds."""

    median: float
    lower: float  # quartiles
    upper: float
    samples: int


@dataclass(frozen=True)
class Memory:
    """Bytes one call took at its peak beyond its inputs, its results included. None where nobody counts."""

    allocator: int | None  # what torch handed out; None on a CPU
    driver: (
        int | None
    )  # what the process took from the device, or on a CPU from the system: fragmentation too


def summarise(seconds: Sequence[float]) -> Spread:
    """Median and quartiles of at least one sample."""
    cuts = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()) * 1e3
    lower, median, upper = cuts.tolist()
    return Spread(median, lower, upper, len(seconds))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """One call: between two events of the stream on CUDA, by the wall clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def memory_of(call: Callable[[], object], device: torch.device) -> Memory:
    """One call with an emptied cache. Results of `call` must not outlive it, except in the problem."""
    if device.type != "cuda":
        return Memory(None, host_memory.peak_of(call))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    return Memory(peak, max(0, free - torch.cuda.mem_get_info(device)[0]))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy far larger than any cache."""
    size = _COPY_BYTES[device.type]
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2e3 * size / summarise([seconds_of(lambda: target.copy_(source), device) for _ in range(7)]).median


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory, or a safe guess."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return 32 << 20
