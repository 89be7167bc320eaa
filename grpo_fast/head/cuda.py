"""The CUDA C++ of `csrc/`, where it was built: one shared library, called through ctypes as torch operators.

Optional: every operator here has a Triton kernel that computes the same, and `tuning` says which one is used.
Importing this module registers the operators; the library is loaded when a plan asks whether it is usable.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).resolve().parent.parent / "_cuda" / "libgrpo_fast.so"
INTERFACE = 2
"""Of `csrc/grpo_fast.h`, as the library must report it."""

REMEDY = "install again where nvcc is on PATH, with GRPO_FAST_CUDA=1 to see why it is not built"
DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class HiddenGradientCall(ctypes.Structure):
    """`grpo_fast_hidden_gradient_call`, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "columns", "values", "starts", "counts", "targets")),
        *((name, c_void_p) for name in ("row_scale", "log_threshold", "used", "overflow", "gradient")),
        *((name, c_int64) for name in ("rows", "depth", "weight_stride", "capacity")),
        *((name, c_int32) for name in ("dtype", "device")),
    ]


class MassCurveCall(ctypes.Structure):
    """`grpo_fast_mass_curve_call`, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("tile_lse", "logsumexp", "targets", "working", "levels", "curve")),
        *((name, c_int64) for name in ("rows", "tiles", "vocabulary")),
        *((name, c_int32) for name in ("tile_columns", "num_levels", "device")),
    ]


def available() -> bool:
    """Whether the library was built; it may still fail to load."""
    return LIBRARY.is_file()


@functools.cache
def usable(index: int) -> bool:
    """Whether the library was built and runs on this device; warns once if it was built and does not."""
    if not available():
        return False
    try:
        library = load()
        _check(library, library.grpo_fast_usable(index))
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"Triton stands in for the CUDA library on cuda:{index}. {error}", stacklevel=2)
        return False
    return True


@functools.cache
def load(path: Path = LIBRARY) -> ctypes.CDLL:
    """The library with its functions declared.

    Raises:
        ImportError: it was not built, cannot be loaded, or was built from other sources.
    """
    if not path.is_file():
        raise ImportError(f"{path} was not built: {REMEDY}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path} cannot be loaded ({error}): {REMEDY}") from error
    if (found := library.grpo_fast_interface()) != INTERFACE:
        raise ImportError(f"{path} has interface {found}, this is {INTERFACE}: {REMEDY}")
    library.grpo_fast_message.restype = ctypes.c_char_p
    library.grpo_fast_hidden_gradient.argtypes = [ctypes.POINTER(HiddenGradientCall), c_void_p]
    library.grpo_fast_mass_curve.argtypes = [ctypes.POINTER(MassCurveCall), c_void_p]
    return library


def hidden_gradient(
    library: ctypes.CDLL,
    weight: Tensor,
    columns: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    targets: Tensor,
    row_scale: Tensor,
    log_threshold: Tensor,
    used: Tensor,
    overflow: Tensor,
) -> Tensor:
    """(N, H) Σ value · W[column] over each row's entries; unwritten when entries or pairs overflowed.

    Args:
        weight: (V, H) bfloat16 or float16, unit stride along H.
        columns: (capacity,) int32, each row's entries next to each other.
        values: (capacity,) float32.
        starts: (N,) int64, first entry of the row.
        counts: (N,) int32.
        targets: (N,) int64.
        row_scale: (N,) float32, |dL/d(x·w)| per probability.
        log_threshold: (N,) float32; entries of a smaller log probability are left out, the target's not.
        used: (1 or more,) int64; the first is the number of entries emitted.
        overflow: (1,) int32.

    Raises:
        TypeError: a tensor of another dtype or layout.
        RuntimeError: the launch failed; the message says why.
    """
    rows, depth = counts.numel(), weight.shape[1]
    if weight.dtype not in DTYPES or (depth > 1 and weight.stride(1) != 1):
        raise TypeError(f"weight is {weight.dtype} with strides {weight.stride()}: give it bf16 or fp16 rows")
    gradient = torch.empty((rows, depth), dtype=weight.dtype, device=weight.device)
    call = HiddenGradientCall(
        weight=weight.data_ptr(),
        columns=_address("columns", columns, c_int32),
        values=_address("values", values, c_float),
        starts=_address("starts", starts, c_int64),
        counts=_address("counts", counts, c_int32),
        targets=_address("targets", targets, c_int64),
        row_scale=_address("row_scale", row_scale, c_float),
        log_threshold=_address("log_threshold", log_threshold, c_float),
        used=_address("used", used, c_int64),
        overflow=_address("overflow", overflow, c_int32),
        gradient=gradient.data_ptr(),
        rows=rows,
        depth=depth,
        weight_stride=weight.stride(0),
        capacity=columns.numel(),
        dtype=DTYPES[weight.dtype],
        device=weight.get_device(),
    )
    _check(library, library.grpo_fast_hidden_gradient(ctypes.byref(call), _stream(weight)))
    return gradient


def mass_curve(
    library: ctypes.CDLL,
    tile_lse: Tensor,
    logsumexp: Tensor,
    targets: Tensor,
    working: Tensor,
    levels: Tensor,
    vocabulary: int,
    tile_columns: int,
) -> Tensor:
    """(L, N) float32: probability of the tiles below each level, the target's tile excepted.

    Args:
        tile_lse: (T, N) float32, log-sum-exp of each tile of `tile_columns` vocabulary entries.
        logsumexp: (N,) float32.
        targets: (N,) int64.
        working: (N,) bool; the curve of other rows is zero.
        levels: (L,) float32, natural logs, descending; the last is -inf. L from 3 to 48.

    Raises:
        TypeError: a tensor of another dtype or layout.
        RuntimeError: the launch failed; the message says why.
    """
    tiles, rows = tile_lse.shape
    curve = torch.empty((levels.numel(), rows), dtype=torch.float32, device=tile_lse.device)
    call = MassCurveCall(
        tile_lse=_address("tile_lse", tile_lse, c_float),
        logsumexp=_address("logsumexp", logsumexp, c_float),
        targets=_address("targets", targets, c_int64),
        working=_address("working", working, c_uint8),
        levels=_address("levels", levels, c_float),
        curve=curve.data_ptr(),
        rows=rows,
        tiles=tiles,
        vocabulary=vocabulary,
        tile_columns=tile_columns,
        num_levels=levels.numel(),
        device=tile_lse.get_device(),
    )
    _check(library, library.grpo_fast_mass_curve(ctypes.byref(call), _stream(tile_lse)))
    return curve


_C_TYPES = {c_int32: torch.int32, c_int64: torch.int64, c_float: torch.float32, c_uint8: torch.bool}


def _address(name: str, tensor: Tensor, element: type) -> int:
    if tensor.dtype != _C_TYPES[element] or not tensor.is_contiguous():
        raise TypeError(
            f"{name} is {tensor.dtype} with strides {tensor.stride()}, not contiguous {_C_TYPES[element]}"
        )
    return tensor.data_ptr()


def _stream(tensor: Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def _check(library: ctypes.CDLL, error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA library: {library.grpo_fast_message(error).decode()} ({error})")


@torch.library.custom_op("grpo_fast::sparse_hidden_gradient", mutates_args=(), device_types="cuda")
def sparse_hidden_gradient(
    weight: Tensor,
    columns: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    targets: Tensor,
    row_scale: Tensor,
    log_threshold: Tensor,
    used: Tensor,
    overflow: Tensor,
) -> Tensor:
    """`hidden_gradient` as an operator; the kernels call it by its name in `torch.ops`."""
    return hidden_gradient(
        load(), weight, columns, values, starts, counts, targets, row_scale, log_threshold, used, overflow
    )


@sparse_hidden_gradient.register_fake
def _(weight, columns, values, starts, counts, targets, row_scale, log_threshold, used, overflow):
    return weight.new_empty((counts.numel(), weight.shape[1]))


@torch.library.custom_op("grpo_fast::tile_mass_curve", mutates_args=(), device_types="cuda")
def tile_mass_curve(
    tile_lse: Tensor,
    logsumexp: Tensor,
    targets: Tensor,
    working: Tensor,
    levels: Tensor,
    vocabulary: int,
    tile_columns: int,
) -> Tensor:
    """`mass_curve` as an operator."""
    return mass_curve(load(), tile_lse, logsumexp, targets, working, levels, vocabulary, tile_columns)


@tile_mass_curve.register_fake
def _(tile_lse, logsumexp, targets, working, levels, vocabulary, tile_columns):
    return tile_lse.new_empty((levels.numel(), tile_lse.shape[1]))
