"""Out of memory: the same work again, in micro-batches half as large. The one retry loop of all trainers.

The losses of micro-batches add up to the step's because they are divided by the counts of the whole step, so
a smaller micro-batch changes the memory and not the update. The optimizer's step is never repeated: it may
have changed some weights and not others.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from types import TracebackType

import torch

from grpo_fast.policy.optimizer import PolicyOptimizer
from grpo_fast.policy.random_state import capture_rng, restore_rng

logger = logging.getLogger(__name__)

# What the libraries below torch say instead of raising torch.OutOfMemoryError.
MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


class Attempt:
    """A context in which running out of memory is noted instead of raised."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.largest = self.longest = 0

    def sizes(self, largest: int, longest: int) -> None:
        """Tokens of this attempt's largest micro-batch, and of the largest unit that is never split."""
        self.largest, self.longest = largest, longest

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            self.error = error
        return self.error is not None


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

    def attempts(self) -> Iterator[Attempt]:
        """Contexts to do one piece of work in, each with a smaller budget than the one before, until it fits.

        Every attempt starts from the same random state; whatever else a failed attempt has changed, the next
        one must set back first. The body calls `Attempt.sizes` before it allocates, and keeps no tensor of a
        failed attempt alive in its own variables.

        Raises:
            torch.OutOfMemoryError: not even one unit fits, or the work must not be repeated.
        """
        random_state = capture_rng()
        while True:
            attempt = Attempt()
            yield attempt
            if attempt.error is None:
                return
            if not self.repeats:
                raise torch.OutOfMemoryError(
                    f"out of memory in a micro-batch of {attempt.largest} tokens, and of sharded weights no "
                    "rank repeats one alone: lower micro_batch_tokens, or set model.gradient_checkpointing = "
                    f"true. The allocator said: {attempt.error}"
                ) from attempt.error
            if attempt.largest <= attempt.longest:
                raise torch.OutOfMemoryError(
                    f"out of memory in a micro-batch of {attempt.largest} tokens, which is {self.unit}: "
                    "micro_batch_tokens cannot be lowered further. Set model.gradient_checkpointing = "
                    f"offload, {self.remedy}, train adapters (model.lora), on 4-bit weights "
                    "(model.quantization = nf4), or freeze the head (model.train_lm_head = false). The "
                    f"allocator said: {attempt.error}"
                ) from attempt.error
            self.limit = max(attempt.largest // 2, attempt.longest)
            logger.warning(
                "out of memory in a micro-batch of %d tokens: this is done again, and the run goes on, with "
                "micro_batch_tokens = %d; the global batch stays as it is",
                attempt.largest,
                self.limit,
            )
            attempt.error = None  # its traceback holds the activations of the attempt
            gc.collect()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # to the driver: the engine takes its memory from there
            restore_rng(random_state)


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
