"""What went wrong, as a state and a reason that fit in a table."""

from __future__ import annotations

import torch

from .patience import OutOfPatience
from .peers import Unsupported

OK, SKIPPED, OOM, ERROR, LATE = "ok", "skipped", "out of memory", "error", "no time left"
NOT_INSTALLED = "not installed"
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class DeviceLost(RuntimeError):
    """Nothing more can be measured in this process; `culprit` is the implementation that ended it."""

    def __init__(self, culprit: str, reason: str) -> None:
        super().__init__(f"{culprit} broke the device: {reason}")
        self.culprit = culprit


def failure_of(error: Exception) -> tuple[str, str]:
    """State and reason."""
    if isinstance(error, ImportError):
        return SKIPPED, f"{NOT_INSTALLED}: {error}"
    if isinstance(error, Unsupported):
        return SKIPPED, str(error)
    if isinstance(error, OutOfPatience):
        return LATE, str(error)
    text = " ".join(str(error).split())
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or any(sign in text for sign in _MEMORY_SIGNS):
        return OOM, ""
    return ERROR, f"{type(error).__name__}: {text[:300]}"
