"""Capture and restore the global random states of Python, NumPy, torch and the current CUDA device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_rng() -> dict[str, Any]:
    """Return the global random states as JSON values."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    _, keys, *rest = numpy
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [keys.tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the states of `capture_rng`, or raise ValueError if CUDA is missing."""
    if "cuda" in state:
        if not torch.cuda.is_available():
            raise ValueError("the random states are those of a run with CUDA; resume it with a CUDA device")
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    torch.set_rng_state(_bytes(state["torch"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(("MT19937", *state["numpy"]))


def _bytes(hexadecimal: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
