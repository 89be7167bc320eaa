"""Out of memory: the same work again, in micro-batches half as large, which changes no update.

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

# Where a user sets torch's allocator. torch warns of all but the first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"

# What the libraries below torch say instead of raising torch.OutOfMemoryError.
MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def expand_segments() -> None:
    """Let torch's allocator grow its segments, which fragment less, unless the user has set it otherwise.

    vLLM turns this off around the pool that its sleep frees, in every version from 0.24 on.
    """
    if not (torch.cuda.is_initialized() or any(name in os.environ for name in ALLOCATOR)):
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


class MicroBatchBudget:
    """Tokens of a micro-batch, halved whenever the memory does not hold them.

    `limit` is what out-of-memory errors have left of the configured budget, None for all of it. A resumed run
    sets it again.

    Args:
        unit: what is never split, for messages.
        remedy: how the unit becomes smaller.
        repeats: whether this process may do its work again: not while other ranks wait in the middle of it.
    """

    def __init__(self, *, unit: str, remedy: str, repeats: bool = True) -> None:
        self.unit = unit
        self.remedy = remedy
        self.repeats = repeats
        self.limit: int | None = None

    def tokens(self, configured: int) -> int:
        """Tokens of a micro-batch now."""
        return configured if self.limit is None else min(configured, self.limit)

    def attempts(
        self, cut: Callable[[], tuple[Parts, int, int]]
    ) -> Iterator[tuple[AbstractContextManager[None], Parts]]:
        """One attempt, and after each that the memory did not hold another with a smaller budget.

            for attempt, parts in budget.attempts(cut):
                with attempt:
                    ...  # the work with these micro-batches

        Every attempt starts from the same random state; whatever else a failed one has changed, the work must
        set back first.

        Args:
            cut: gives the micro-batches of today's budget, the tokens of the largest of them, and those of
                the largest unit.

        Raises:
            torch.OutOfMemoryError: not even one unit fits, or the work must not be repeated. Raised out of
                the `with` block.
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
                gc.collect()  # the error is gone, and with its traceback the activations of the attempt
                if torch.cuda.is_available() and torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # to the driver: the engine takes its memory from there
                restore_rng(random_state)

    def _shrink(self, largest: int, longest: int, error: RuntimeError) -> None:
        problem = f"out of memory in a micro-batch of {largest} tokens"
        if not self.repeats:
            raise torch.OutOfMemoryError(
                f"{problem}, and of sharded weights no rank repeats one alone: lower micro_batch_tokens, or "
                f"set model.gradient_checkpointing = true. The allocator said: {error}"
            ) from error
        if largest <= longest:
            raise torch.OutOfMemoryError(
                f"{problem}, which is {self.unit}: micro_batch_tokens cannot be lowered further. Set "
                f"model.gradient_checkpointing = offload, {self.remedy}, train adapters (model.lora), on "
                "4-bit weights (model.quantization = nf4), or freeze the head (model.train_lm_head = false). "
                f"The allocator said: {error}"
            ) from error
        self.limit = max(largest // 2, longest)
        logger.warning(
            "out of memory in a micro-batch of %d tokens: this is done again, and the run goes on, with "
            "micro_batch_tokens = %d; the global batch stays as it is",
            largest,
            self.limit,
        )


def optimizer_step(optimizer: PolicyOptimizer) -> float:
    """`optimizer.step()`; smaller micro-batches are no help where this does not fit.

    Raises:
        torch.OutOfMemoryError: names what helps. Unless `optimizer.mid_step` the weights are as before.
    """
    try:
        return optimizer.step()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "out of memory in the optimizer's step, where smaller micro-batches do not help: Adam's moments "
            "take 8 bytes for each trained parameter. Set optimizer.kind = adamw_8bit, which takes 2, or "
            "adamw_offload, train adapters (model.lora), or freeze the head (model.train_lm_head = false); "
            "`grpo-fast plan` lists what else makes room. The allocator said: "
            f"{error}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever noticed: torch, cuBLAS, the driver or the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MESSAGES)
