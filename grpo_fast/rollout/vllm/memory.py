"""The memory that vLLM's sleep gives away: who lies in it, and whether there is room to take it back.

While vLLM loads a model and allocates its KV cache, everything that the starting thread allocates comes from
a pool under a tag; sleeping unmaps what the pool holds, waking maps it at the same addresses. A pool that
fails half-way through waking cannot be asked again before vLLM 0.28, and one that gave memory back is not to
be destroyed: torch would free it a second time. So room is asked for first, and shared weights, which move
out of the pool as they load, never enter it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

GIB = 2**30
TAGS = ("weights", "kv_cache")


def bytes_in_pool(tag: str | None = None) -> int:
    """What waking `tag` maps; None: all that the pool holds. 0 where nothing was ever put into one."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = [] if CuMemAllocator.instance is None else CuMemAllocator.instance.pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if tag is None or _comes_with(data, tag))


def _comes_with(data: Any, tag: str) -> bool:
    """Graphs and workspaces, which newer versions put into the pool, come back with whatever is first."""
    return data.tag == tag or (data.tag not in TAGS and getattr(data, "is_asleep", False))


def require_room(tag: str) -> None:
    """
    Raises:
        torch.OutOfMemoryError: waking `tag` would run out of memory half-way.
    """
    needed = bytes_in_pool(tag)
    if not needed or needed <= torch.cuda.mem_get_info()[0]:
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory: it takes {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free"
        )


def require_empty_pool() -> None:
    """
    Raises:
        RuntimeError: an engine that was closed has left memory there, and vLLM takes an empty pool only.
    """
    if held := bytes_in_pool():
        raise RuntimeError(
            f"an earlier vLLM engine of this process still holds {held / GIB:.2f} GiB of vLLM's memory pool, "
            "which must be empty at the start; start a new process, or set rollout.vllm.sleep_level to 0"
        )


@contextmanager
def weights_outside_the_pool() -> Iterator[None]:
    """vLLM's next model lies in torch's own memory, which no sleep touches; its KV cache lies in the pool."""
    from vllm.v1.worker.gpu_worker import Worker

    pool = Worker._maybe_get_memory_pool_context

    def outside(worker: Any, tag: str) -> Any:
        return nullcontext() if tag == "weights" else pool(worker, tag)

    Worker._maybe_get_memory_pool_context = outside
    try:
        yield
    finally:
        Worker._maybe_get_memory_pool_context = pool
