"""Repeat work that ran out of memory in micro-batches half as large, which changes no update.

The optimizer's step is never repeated: it may have changed some weights and not others.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

from grpo_fast.policy.optimizer import PolicyOptimizer
from grpo_fast.policy.random_state import capture_rng, restore_rng

logger = logging.getLogger(__name__)
Parts = TypeVar("Parts")

# Environment variables of torch's allocator. torch warns about all but the first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"

# Messages of libraries that do not raise torch.OutOfMemoryError.
MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def expand_segments() -> None:
    """Let torch's allocator grow its segments, unless the user configures it.

    vLLM from 0.24 on turns this off around the pool that its sleep frees.
    """
    if not (torch.cuda.is_initialized() or any(name in os.environ for name in ALLOCATOR)):
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


class MicroBatchBudget:
    """Tokens of a micro-batch, halved when the memory runs out.

    Args:
        unit: the smallest micro-batch, for messages.
        remedy: how the unit becomes smaller.
        repeats: whether this process may repeat its work: not while other ranks wait for it.
    """

    def __init__(self, *, unit: str, remedy: str, repeats: bool = True) -> None:
        self.unit = unit
        self.remedy = remedy
        self.repeats = repeats
        self.limit: int | None = None

    def tokens(self, configured: int) -> int:
        """Return the current tokens of a micro-batch."""
        return configured if self.limit is None else min(configured, self.limit)

    def attempts(
        self, cut: Callable[[], tuple[Parts, int, int]]
    ) -> Iterator[tuple[AbstractContextManager[None], Parts]]:
        """Yield attempts with smaller and smaller budgets, until one fits.

            for attempt, parts in budget.attempts(cut):
                with attempt:
                    ...  # the work with these micro-batches

        Each attempt starts from the same random state. The work must first undo changes of a failed one.
        `cut` returns the micro-batches of the current budget, the tokens of the largest of them, and those
        of the largest unit. `attempt` raises torch.OutOfMemoryError if no unit fits, or without `repeats`.
        """
        random_state = capture_rng()
        again = True

        @contextmanager
        def attempt(largest: int, longest: int) -> Iterator[None]:
            nonlocal again
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink(largest, longest, error)
                again = True

        while again:
            again = False
            parts, *sizes = cut()
            yield attempt(*sizes), parts
            if again:
                gc.collect()  # frees the activations that the error's traceback held
                if torch.cuda.is_available() and torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # for the engine, which allocates from the driver
                restore_rng(random_state)

    def _shrink(self, largest: int, longest: int, error: RuntimeError) -> None:
        problem, remedy = f"out of memory in a micro-batch of {largest} tokens", None
        if not self.repeats:
            remedy = (
                ", which ranks with sharded weights do not repeat: lower micro_batch_tokens, or set "
                "model.gradient_checkpointing = true"
            )
        elif largest <= longest:
            remedy = (
                f", which is {self.unit}: micro_batch_tokens cannot be lowered further. Set "
                f"model.gradient_checkpointing = offload, {self.remedy}, train adapters (model.lora), on "
                "4-bit weights (model.quantization = nf4), or freeze the head (model.train_lm_head = false)"
            )
        if remedy is not None:
            raise torch.OutOfMemoryError(f"{problem}{remedy}. The allocator said: {error}") from error
        self.limit = max(largest // 2, longest)
        logger.warning(
            "%s: it is repeated, and the run goes on, with micro_batch_tokens = %d; the global batch is "
            "unchanged",
            *(problem, self.limit),
        )


def optimizer_step(optimizer: PolicyOptimizer) -> float:
    """Call `optimizer.step()`, and name remedies if the memory runs out."""
    try:
        return optimizer.step()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "out of memory in the optimizer's step, where smaller micro-batches do not help: Adam's moments "
            "take 8 bytes for each trained parameter. Set optimizer.kind = adamw_8bit, which takes 2, or "
            "adamw_offload, train adapters (model.lora), or freeze the head (model.train_lm_head = false); "
            f"`grpo-fast plan` lists what else makes room. The allocator said: {error}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch, cuBLAS, the driver or the CPU's allocator ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MESSAGES)
