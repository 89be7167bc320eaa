"""The CUDA C++ of `csrc/`, where it was built: a shared library in plain C, called through ctypes.

Optional: both functions have a Triton kernel that computes the same, and `SparseConfig` says which one runs.
The library is loaded when a plan asks whether it is usable. This module needs no Triton.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from . import TILE

LIBRARY = Path(str(files("grpo_fast"))) / "_cuda" / "libgrpo_fast.so"
INTERFACE = 2
"""Of `csrc/grpo_fast.h`, as the library must report it."""

_REMEDY = "install again where nvcc is on PATH, with GRPO_FAST_CUDA=1 to see why it is not built"
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}

ENTRIES = {
    "columns": torch.int32, "values": torch.float32, "starts": torch.int64, "counts": torch.int32,
    "targets": torch.int64, "row_scale": torch.float32, "log_threshold": torch.float32,
    "used": torch.int64, "overflow": torch.int32,
}  # fmt: skip
MASSES = {
    "tile_lse": torch.float32, "logsumexp": torch.float32, "targets": torch.int64, "working": torch.bool,
    "levels": torch.float32,
}  # fmt: skip
"""The tensors of each call, in its order, and their dtypes; contiguous. `grpo_fast.h` says what they hold."""


def _fields(addresses: tuple[str, ...], sizes: tuple[str, ...], options: tuple[str, ...]) -> list[tuple]:
    kinds = (ctypes.c_void_p, addresses), (ctypes.c_int64, sizes), (ctypes.c_int32, options)
    return [(name, kind) for kind, names in kinds for name in names]


class HiddenGradientCall(ctypes.Structure):
    """`grpo_fast_hidden_gradient_call`, field by field."""

    _fields_ = _fields(
        ("weight", *ENTRIES, "gradient"), ("rows", "depth", "weight_stride", "capacity"), ("dtype", "device")
    )


class MassCurveCall(ctypes.Structure):
    """`grpo_fast_mass_curve_call`, field by field."""

    _fields_ = _fields(
        (*MASSES, "curve"), ("rows", "tiles", "vocabulary"), ("tile_columns", "num_levels", "device")
    )


def available() -> bool:
    """Whether the library was built; it may still fail to load."""
    return LIBRARY.is_file()


def usable(index: int) -> bool:
    """Whether the library was built and runs on this device; warns if it was built and does not."""
    if not available():
        return False
    try:
        _check(load().grpo_fast_usable(index))
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"Triton stands in for the CUDA library on cuda:{index}. {error}", stacklevel=2)
        return False
    return True


@functools.cache
def load() -> ctypes.CDLL:
    """The library.

    Raises:
        ImportError: it cannot be loaded, or was built from other sources.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"{LIBRARY} cannot be loaded ({error}): {_REMEDY}") from error
    if (found := library.grpo_fast_interface()) != INTERFACE:
        raise ImportError(f"{LIBRARY} has interface {found}, this is {INTERFACE}: {_REMEDY}")
    library.grpo_fast_message.restype = ctypes.c_char_p
    return library


def hidden_gradient(weight: Tensor, *entries: Tensor) -> Tensor:
    """(N, H) Σ value · W[column] over each row's entries; unwritten where entries or pairs overflowed.

    Args:
        weight: (V, H) bfloat16 or float16, unit stride along H.
        entries: those of `ENTRIES`.

    Raises:
        TypeError: a tensor of another dtype or layout.
        RuntimeError: the launch failed; the message says why.
    """
    given = dict(zip(ENTRIES, entries, strict=True))
    rows, depth = given["counts"].numel(), weight.shape[1]
    gradient = torch.empty((rows, depth), dtype=weight.dtype, device=weight.device)
    call = HiddenGradientCall(
        **_addresses(given, ENTRIES), weight=weight.data_ptr(), gradient=gradient.data_ptr(),
        rows=rows, depth=depth, weight_stride=weight.stride(0), capacity=given["columns"].numel(),
        dtype=_DTYPES[weight.dtype], device=weight.get_device(),
    )  # fmt: skip
    _check(load().grpo_fast_hidden_gradient(ctypes.byref(call), _stream(weight)))
    return gradient


def mass_curve(*masses: Tensor, vocabulary: int) -> Tensor:
    """(L, N) float32: probability of the tiles below each level, the target's tile excepted.

    Args:
        masses: those of `MASSES`.

    Raises:
        TypeError, RuntimeError: as `hidden_gradient`.
    """
    given = dict(zip(MASSES, masses, strict=True))
    (tiles, rows), levels = given["tile_lse"].shape, given["levels"].numel()
    curve = torch.empty((levels, rows), dtype=torch.float32, device=masses[0].device)
    call = MassCurveCall(
        **_addresses(given, MASSES), curve=curve.data_ptr(), rows=rows, tiles=tiles, vocabulary=vocabulary,
        tile_columns=TILE, num_levels=levels, device=curve.get_device(),
    )  # fmt: skip
    _check(load().grpo_fast_mass_curve(ctypes.byref(call), _stream(curve)))
    return curve


def _addresses(given: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, int]:
    for name, tensor in given.items():
        if tensor.dtype != dtypes[name] or not tensor.is_contiguous():
            found = f"{name} is {tensor.dtype} with strides {tensor.stride()}"
            raise TypeError(f"{found}, not contiguous {dtypes[name]}")
    return {name: tensor.data_ptr() for name, tensor in given.items()}


def _stream(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None)


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA library: {load().grpo_fast_message(error).decode()} ({error})")
