"""vLLM's sleep as a cycle whose steps can be repeated, and vLLM's memory pool.

vLLM accepts requests while parts of its memory sleep, and then hangs; a second sleep or wake unmaps or maps
memory twice. `SleepCycle` knows what sleeps: a repeated step does nothing, and a failed one can be repeated.

While vLLM loads a model and allocates its KV cache, all allocations of the thread come from a pool with a
tag. Sleep unmaps the pool's memory; wake maps it at the same addresses. Before vLLM 0.28 a wake that failed
half-way cannot be repeated, so we check for room first. Shared weights stay out of the pool.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)
GIB = 2**30
TAGS = ("weights", "kv_cache")


class SleepCycle:
    """The sleep state of a vLLM engine.

    Level 0 pauses, 1 moves weights to the host and drops the KV cache, 2 drops both. `asleep` are the
    sleeping tags, in the order in which they wake.
    """

    def __init__(self, engine: LLMEngine, level: Literal[0, 1, 2]) -> None:
        self.level = level
        self.asleep: tuple[str, ...] = ()
        self.weights_dropped = False
        self._engine = engine

    def require_awake(self) -> None:
        """Raise RuntimeError if a request would hang."""
        if self.asleep:
            raise RuntimeError(
                f"generate() on a sleeping engine ({', '.join(self.asleep)}); call wake() first"
            )
        if self._engine.is_sleeping():
            raise RuntimeError("vLLM was put to sleep behind the engine's back; call the engine's sleep()")

    def sleep(self) -> None:
        """Put vLLM to sleep, unless it sleeps."""
        if not self.asleep:
            # Set first: after a failure, nothing may generate until a wake has succeeded.
            self.asleep = TAGS if self.level > 0 else ("scheduling",)
            self.weights_dropped = self.level == 2
            self._engine.sleep(level=self.level)

    def freed(self) -> int:
        """Return the bytes that waking allocates."""
        return bytes_in_pool(self.asleep) if self.asleep and self.level > 0 else 0

    def wake_weights(self) -> None:
        """Allocate memory for weights that were freed."""
        if "weights" in self.asleep:
            self._wake_next()

    def weights_loaded(self) -> None:
        self.weights_dropped = False

    def wake(self) -> None:
        """Wake vLLM, unless it is awake.

        Raises:
            RuntimeError: the weights were dropped and not loaded since, or memory is short.
        """
        if self.weights_dropped:
            raise RuntimeError("wake() on an engine whose weights were dropped; call sync() first")
        while self.asleep:
            self._wake_next()

    def _wake_next(self) -> None:
        tag, *others = self.asleep
        try:
            if self.level > 0:
                require_room(tag)
            self._engine.wake_up(tags=[tag])
        except Exception as error:
            raise RuntimeError(
                f"vLLM could not take back its memory ({tag}): {error}; free some and call wake() again, or "
                "lower rollout.vllm.kv_cache_gib or rollout.vllm.gpu_memory_utilization"
            ) from error
        if not others and self._engine.is_sleeping():
            raise RuntimeError("vLLM did not wake up completely; call wake() again once memory is free")
        self.asleep = tuple(others)


def bytes_in_pool(tags: Collection[str] | None = None) -> int:
    """Return the bytes that waking `tags` maps; None: all that the pool holds."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pool = CuMemAllocator.instance
    size = 0
    for data in () if pool is None else pool.pointer_to_data.values():
        # Newer versions put graphs and workspaces into the pool, which wake with the first tag.
        other = data.tag not in TAGS and getattr(data, "is_asleep", False)
        size += data.handle[1] if tags is None or data.tag in tags or other else 0
    return size


def require_room(tag: str) -> None:
    """Raise torch.OutOfMemoryError if waking `tag` would run out of memory half-way."""
    needed = bytes_in_pool([tag])
    if not needed or needed <= torch.cuda.mem_get_info()[0]:
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory: it takes {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free"
        )


def require_empty_pool() -> None:
    """Raise RuntimeError if a closed engine has left memory in the pool, where vLLM refuses to start."""
    if held := bytes_in_pool():
        raise RuntimeError(
            f"an earlier vLLM engine of this process still holds {held / GIB:.2f} GiB of vLLM's memory pool, "
            "which must be empty at the start; start a new process, or set rollout.vllm.sleep_level to 0"
        )


def release_pool() -> None:
    """Free what a failed start has left in vLLM's pool, none of which has slept."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if (pool := CuMemAllocator.instance) is None:
        return
    tagged = pool.allocator_and_pools.values()  # a pair for each tag before vLLM 0.28, then a list of pairs
    pairs = [pair for kept in tagged for pair in (kept if isinstance(kept, list) else [kept])]
    allocators = [pair[1] for pair in pairs]  # memory pools call them as they end
    pool.allocator_and_pools.clear()
    pairs.clear()
    gc.collect()
    allocators.clear()


def weights_outside_the_pool() -> AbstractContextManager[Any]:
    """Load vLLM's next model into torch's memory, which sleep leaves alone; the KV cache uses the pool."""
    from vllm.v1.worker import gpu_worker

    worker_class: Any = gpu_worker.Worker
    pool = worker_class._maybe_get_memory_pool_context

    def outside(worker: Any, tag: str) -> AbstractContextManager[Any]:
        return nullcontext() if tag == "weights" else pool(worker, tag)

    return patch.object(worker_class, "_maybe_get_memory_pool_context", outside)


def bounded_cache(gib: float, share: float) -> AbstractContextManager[Any]:
    """Give vLLM's next KV cache a share of `gib`, or of the room that vLLM measures if that is less.

    vLLM's own options for its size replace the measurement.
    """
    from vllm.v1.worker import gpu_worker

    worker_class: Any = gpu_worker.Worker
    measure = worker_class.determine_available_memory

    def bounded(worker: Any) -> int:
        room = measure(worker) / GIB
        if room <= 0:
            raise ValueError(
                f"vLLM's weights and activations take {-room:.2f} GiB more than its share of the GPU, "
                "without a KV cache; raise rollout.vllm.gpu_memory_utilization where it is set, lower "
                "rollout.vllm.max_sequences, or set rollout.vllm.enforce_eager to true"
            )
        if room < gib < math.inf:
            logger.warning(
                "rollout.vllm.kv_cache_gib = %g does not fit: vLLM has room for %.2f GiB and takes that",
                gib,
                room,
            )
        return int(share * min(room, gib) * GIB)

    return patch.object(worker_class, "determine_available_memory", bounded)
