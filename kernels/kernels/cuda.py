"""The CUDA C++ of `csrc/`, where it was built: one function of a shared library in plain C, through ctypes.

It is used without being asked for, unless it does not run, or does not agree on a small case with the Triton
kernel that computes the same. This module needs no Triton before that.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import LEVELS, TILE

LIBRARY = Path(str(files("grpo_fast"))) / "_cuda" / "libgrpo_fast.so"


class _MassCurve(ctypes.Structure):
    """`MassCurve` of `csrc/mass_curve.cu`."""

    _fields_ = [
        ("tile_lse", ctypes.c_void_p), ("logsumexp", ctypes.c_void_p), ("targets", ctypes.c_void_p),
        ("target_gradient", ctypes.c_void_p), ("mass_gradient", ctypes.c_void_p), ("curve", ctypes.c_void_p),
        ("stride", ctypes.c_int64), ("vocabulary", ctypes.c_int64),
        ("rows", ctypes.c_int32), ("tiles", ctypes.c_int32),
    ]  # fmt: skip


@functools.cache
def _load() -> Any:
    """
    Raises:
        OSError: the library cannot be loaded.
        AttributeError: it was built from other sources: the function's name changes with its arguments.
    """
    function = ctypes.CDLL(str(LIBRARY)).grpo_fast_mass_curve_3
    function.argtypes, function.restype = (_MassCurve, ctypes.c_void_p), ctypes.c_char_p
    return function


def mass_curve(tile_lse: Tensor, *rows: Tensor, vocabulary: int) -> Tensor:
    """(N, LEVELS) float32: the mass of a row's tiles below each level, the target's tile excepted.

    Args:
        tile_lse: (N, T) float32, on the current device.
        rows: logsumexp, targets, target_gradient and mass_gradient, (N,), as of `select.counted_curve`.

    Raises:
        RuntimeError: nothing was launched; the message says why.
    """
    count, tiles = tile_lse.shape
    curve = tile_lse.new_empty((count, LEVELS))
    addresses = (tensor.data_ptr() for tensor in (tile_lse, *rows, curve))
    stream = torch.cuda.current_stream(curve.device).cuda_stream if curve.is_cuda else None
    error = _load()(_MassCurve(*addresses, tile_lse.stride(0), vocabulary, count, tiles), stream)
    if error:
        raise RuntimeError(error.decode())
    return curve


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether the library was built and agrees with Triton on this device; warns if it does not.

    Asked once, as it waits for the device. Where that is while a graph is captured, the answer is no.
    """
    if device.type != "cuda" or not LIBRARY.is_file() or torch.cuda.is_current_stream_capturing():
        return False
    try:
        fault = disagreement(device)
    except (OSError, AttributeError, RuntimeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        warnings.warn(
            f"Triton stands in for csrc/ on {device}: {fault}. "
            f"Build it again, with GRPO_FAST_CUDA=1 and nvcc on PATH, or remove {LIBRARY}.",
            stacklevel=2,
        )
    return not fault


def disagreement(device: torch.device) -> str:
    """What differs between the two curves of a fixed case; nothing where the library can be trusted.

    A counted curve lies above the exact one, by at most 2^(1/4).
    """
    from .select import counted_curve

    place = torch.arange(6 * 304, device=device).view(6, 304)
    log2_mass = -36 * (place * 0.618034 % 1) ** 0.25  # what is smaller has no upper edge in a count
    log2_mass[1:, ::3] = (2 * log2_mass[1:, ::3]).round() / 2  # on the levels
    log2_mass[:, 0] = log2_mass[:, 299] = -5  # what the target's tile holds is seen
    log2_mass[2, ::7], log2_mass[3] = -torch.inf, torch.nan
    tile_lse = (log2_mass * math.log(2) + 3)[:, :300]
    ones, vocabulary = torch.ones(6, device=device), 300 * TILE
    targets = torch.tensor([5, vocabulary - 1, vocabulary, 7, -1, 9], device=device)
    work = torch.tensor([1, torch.nan, -1, 1, 1, 0], device=device)
    rows = 3 * ones, targets, work, 0 * ones
    exact, counted = (curve(tile_lse, *rows, vocabulary=vocabulary) for curve in (mass_curve, counted_curve))
    agree = (exact <= counted * (1 + 1e-5)) & (exact >= counted * 2**-0.25 * (1 - 1e-5))
    wrong = (~agree.all(1)).nonzero().flatten().tolist()
    return f"the masses of rows {wrong} of its first check differ" if wrong else ""
