"""The CUDA C++ of `csrc/`, where it was built: one function of a shared C library, called through ctypes.

It replaces a Triton kernel where the library loads and both agree on a small case.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import BINS, TILE

if TYPE_CHECKING:
    from .coefficients import Masses

LIBRARY = Path(str(files("grpo_fast"))) / "_cuda" / "libgrpo_fast.so"


@functools.cache
def _load() -> Any:
    """Load the library's function.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it was built from other sources; the function's name has a version.
    """
    function = ctypes.CDLL(str(LIBRARY)).grpo_fast_count_pairs_2
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_char_p
    return function


def count_pairs(masses: Masses, squares: Tensor) -> Tensor:
    """Return (1, BINS) int64, as `select.count_pairs`; the masses are on the current device.

    Raises:
        RuntimeError: the launch failed.
    """
    count, tiles = masses.tile_lse.shape
    counts = masses.tile_lse.new_empty((min(-(-count // _WARPS), _MOST_BLOCKS), BINS), dtype=torch.int32)
    tensors = *masses[: masses._fields.index("row_stride")], squares, counts
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    sizes = masses.row_stride, masses.vocabulary, count, tiles, squares.numel(), counts.shape[0]
    stream = torch.cuda.current_stream(counts.device).cuda_stream if counts.is_cuda else None
    error = _load()(_Call(*addresses, *sizes), stream)
    if error:
        raise RuntimeError(error.decode())
    return counts.sum(0, keepdim=True)


_WARPS, _MOST_BLOCKS = 8, 512  # rows of a block at a time, and blocks
_Call = ctypes.c_int64 * 16  # `CountPairs` of `csrc/count_pairs.cu`


@functools.cache
def usable(device: torch.device, by_triton: Callable[[Masses, Tensor], Tensor]) -> bool:
    """Return whether the library was built and agrees with Triton on this device; warn if it does not.

    Cached, because the check synchronizes. During graph capture the answer is no.
    """
    if device.type != "cuda" or not LIBRARY.is_file() or torch.cuda.is_current_stream_capturing():
        return False
    try:
        fault = disagreement(device, by_triton)
    except (OSError, AttributeError, RuntimeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        warnings.warn(
            f"Triton replaces csrc/ on {device}: {fault}. "
            f"Build it again, with GRPO_FAST_CUDA=1 and nvcc on PATH, or remove {LIBRARY}.",
            stacklevel=2,
        )
    return not fault


def disagreement(device: torch.device, by_triton: Callable[[Masses, Tensor], Tensor]) -> str:
    """Describe how the two counts of a fixed case differ; empty if they agree."""
    from .coefficients import Masses, RowCoefficients

    place = torch.arange(6 * 304, device=device).view(6, 304)
    octaves = (place * 7 % 151 + 0.5) / 4  # in the middle of a quarter octave, where rounding moves nothing
    tile_lse = (3 - octaves * math.log(2))[:, :300]
    tile_lse[2, ::7], tile_lse[3] = -torch.inf, torch.nan
    ones, vocabulary = torch.ones(6, device=device), 300 * TILE
    targets = torch.tensor([5, vocabulary - 1, vocabulary, 7, -1, 9], device=device)
    work = torch.tensor([1, torch.nan, -1, 1, 4, 0], device=device)
    squares = torch.ones(1, dtype=torch.float64, device=device)
    rows = RowCoefficients(3 * ones, 0 * ones, work, ones, None, None, squares, squares.long())
    masses = Masses.of(tile_lse, targets, rows, vocabulary)
    found, expected = (count(masses, squares).sum(0).tolist() for count in (count_pairs, by_triton))
    wrong = [bin for bin, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1]
    return f"the pairs of quarter octaves {wrong} of its first check differ" if wrong else ""
