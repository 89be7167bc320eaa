"""The CUDA C++ of `csrc/`, where it was built: one shared library, called through ctypes as torch operators.

Optional: every operator here has a Triton kernel that computes the same, and `tuning` says which one is used.
Importing this module registers the operators; the library is loaded when a plan asks whether it is usable.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Mapping
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).resolve().parent.parent / "_cuda" / "libgrpo_fast.so"
INTERFACE = 2
"""Of `csrc/grpo_fast.h`, as the library must report it."""

REMEDY = "install again where nvcc is on PATH, with GRPO_FAST_CUDA=1 to see why it is not built"
DTYPES = {torch.bfloat16: 0, torch.float16: 1}

ENTRIES = {
    "columns": torch.int32,  # (capacity,) each row's entries next to each other
    "values": torch.float32,  # (capacity,)
    "starts": torch.int64,  # (N,) first entry of the row
    "counts": torch.int32,  # (N,)
    "targets": torch.int64,  # (N,)
    "row_scale": torch.float32,  # (N,) |dL/d(x·w)| per probability
    "log_threshold": torch.float32,  # (N,) entries of smaller log probability are left out, the target never
    "used": torch.int64,  # (1 or more,) the first is the number of entries emitted
    "overflow": torch.int32,  # (1,)
}
MASSES = {
    "tile_lse": torch.float32,  # (T, N) log-sum-exp of each tile's vocabulary entries
    "logsumexp": torch.float32,  # (N,)
    "targets": torch.int64,  # (N,)
    "working": torch.bool,  # (N,) the curve of other rows is zero
    "levels": torch.float32,  # (L,) natural logs, descending; the last is -inf. L from 3 to 48
}
"""The tensors of each call, in its order: names, and the dtypes that they must have, contiguous."""


class HiddenGradientCall(ctypes.Structure):
    """`grpo_fast_hidden_gradient_call`, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", *ENTRIES, "gradient")),
        *((name, c_int64) for name in ("rows", "depth", "weight_stride", "capacity")),
        *((name, c_int32) for name in ("dtype", "device")),
    ]


class MassCurveCall(ctypes.Structure):
    """`grpo_fast_mass_curve_call`, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in (*MASSES, "curve")),
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


def hidden_gradient(library: ctypes.CDLL, weight: Tensor, *entries: Tensor) -> Tensor:
    """(N, H) Σ value · W[column] over each row's entries; unwritten when entries or pairs overflowed.

    Args:
        weight: (V, H) bfloat16 or float16, unit stride along H.
        entries: those of `ENTRIES`.

    Raises:
        TypeError: a tensor of another dtype or layout.
        RuntimeError: the launch failed; the message says why.
    """
    given = dict(zip(ENTRIES, entries, strict=True))
    rows, depth = given["counts"].numel(), weight.shape[1]
    if weight.dtype not in DTYPES or (depth > 1 and weight.stride(1) != 1):
        raise TypeError(f"weight is {weight.dtype} with strides {weight.stride()}: give it bf16 or fp16 rows")
    gradient = torch.empty((rows, depth), dtype=weight.dtype, device=weight.device)
    call = HiddenGradientCall(
        **_addresses(given, ENTRIES),
        weight=weight.data_ptr(),
        gradient=gradient.data_ptr(),
        rows=rows,
        depth=depth,
        weight_stride=weight.stride(0),
        capacity=given["columns"].numel(),
        dtype=DTYPES[weight.dtype],
        device=weight.get_device(),
    )
    _check(library, library.grpo_fast_hidden_gradient(ctypes.byref(call), _stream(weight)))
    return gradient


def mass_curve(library: ctypes.CDLL, *arguments: Tensor | int) -> Tensor:
    """(L, N) float32: probability of the tiles below each level, the target's tile excepted.

    Args:
        arguments: the tensors of `MASSES`, V, and the vocabulary entries of a tile.

    Raises:
        TypeError: a tensor of another dtype or layout.
        RuntimeError: the launch failed; the message says why.
    """
    *masses, vocabulary, tile_columns = arguments
    given = {name: tensor for name, tensor in zip(MASSES, masses, strict=True) if isinstance(tensor, Tensor)}
    tile_lse, levels = given["tile_lse"], given["levels"]
    tiles, rows = tile_lse.shape
    curve = torch.empty((levels.numel(), rows), dtype=torch.float32, device=tile_lse.device)
    call = MassCurveCall(
        **_addresses(given, MASSES),
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


def _addresses(given: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    for name, tensor in given.items():
        if tensor.dtype != dtypes[name] or not tensor.is_contiguous():
            found = f"{name} is {tensor.dtype} with strides {tensor.stride()}"
            raise TypeError(f"{found}, not contiguous {dtypes[name]}")
    return {name: tensor.data_ptr() for name, tensor in given.items()}


def _stream(tensor: Tensor) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


def _check(library: ctypes.CDLL, error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA library: {library.grpo_fast_message(error).decode()} ({error})")


def _schema(*tensors: str, also: str = "") -> str:
    return f"({', '.join(f'Tensor {name}' for name in tensors)}{also}) -> Tensor"


# The kernels call these by their names in `torch.ops`.


@torch.library.custom_op(
    "grpo_fast::sparse_hidden_gradient",
    mutates_args=(),
    device_types="cuda",
    schema=_schema("weight", *ENTRIES),
)
def sparse_hidden_gradient(*arguments: Tensor) -> Tensor:
    return hidden_gradient(load(), *arguments)


@sparse_hidden_gradient.register_fake
def _(weight: Tensor, *entries: Tensor) -> Tensor:
    counts = dict(zip(ENTRIES, entries, strict=True))["counts"]
    return weight.new_empty((counts.numel(), weight.shape[1]))


@torch.library.custom_op(
    "grpo_fast::tile_mass_curve",
    mutates_args=(),
    device_types="cuda",
    schema=_schema(*MASSES, also=", int vocabulary, int tile_columns"),
)
def tile_mass_curve(*arguments: Tensor | int) -> Tensor:
    return mass_curve(load(), *arguments)


@tile_mass_curve.register_fake
def _(tile_lse: Tensor, *others: Tensor | int) -> Tensor:
    levels = others[-3]
    assert isinstance(levels, Tensor)
    return tile_lse.new_empty((levels.numel(), tile_lse.shape[1]))
