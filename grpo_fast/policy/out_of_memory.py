"""Out of memory: who says so in which words, and how cached memory is given back."""

from __future__ import annotations

import gc

import torch

# What the libraries below torch say instead of raising torch.OutOfMemoryError.
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, whoever noticed: torch, cuBLAS, the driver or the CPU's allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def release_memory() -> None:
    """Give cached blocks back, to the driver as well: another tenant may need them."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
