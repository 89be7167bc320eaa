"""Which path the head takes, with which tiles and how much memory.

Pure: decided from sizes and facts of the device, so it is tested without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_fast.kernels import TILE, ProductTile

DEFAULT_TOLERANCE = 1.0
"""What the backward may leave out, in units of what rounding the logit gradient to bfloat16 costs anyway."""

_CPU_CHUNK_BYTES = 8 << 20
_DEVICE_CHUNK_BYTES = 256 << 20
_CHUNK_ROWS = 512
_DENSE_WORKSPACE_BYTES = 192 << 20
_SCRATCH_BYTES = 1 << 10  # shared memory the compiler takes besides operands and results: barriers


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of the device."""

    kind: str  # "cpu", "cuda", ...
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    shared_memory: int = 0  # bytes one program may use
    has_triton: bool = False


@dataclass(frozen=True)
class Workload:
    """What a plan needs to know of the call."""

    rows: int
    vocabulary: int
    dtype: torch.dtype
    softcap: bool = False
    extra_statistics: bool = False  # anything beyond log-probability and log-sum-exp
    dense_gradient: bool = False  # upstream gradients of the entropy or the mean logit: not sparse
    tolerance: float | None = None  # None for DEFAULT_TOLERANCE
    aligned: bool = True  # operands fit tensor descriptors: unit stride along H, rows on 16 bytes


@dataclass(frozen=True)
class Chunks:
    """Rows and vocabulary entries held as logits at one time by the reference path."""

    rows: int
    columns: int


@dataclass(frozen=True)
class HeadPlan:
    path: Literal["reference", "triton"]
    backward: Literal["dense", "sparse"]  # dense: exact, and where nothing can be left out
    tolerance: float
    chunks: Chunks  # of the reference path
    forward_tile: ProductTile
    backward_tile: ProductTile
    dense_columns: int  # vocabulary entries per chunk of the dense backward


def plan_head(device: Device, work: Workload) -> HeadPlan:
    """The plan for one call."""
    tolerance = DEFAULT_TOLERANCE if work.tolerance is None else work.tolerance
    exact = tolerance == 0 or work.dense_gradient
    # A softcap and many statistics together, or the entropy's gradient, need the registers of half a tile.
    forward_wide = not (work.softcap and work.extra_statistics)
    backward_wide = not (work.softcap or work.dense_gradient)
    forward_tile = _descriptor_tile(device, work, wide=forward_wide) or _pointer_tile(work, backward=False)
    backward_tile = _descriptor_tile(device, work, wide=backward_wide) or _pointer_tile(work, backward=True)
    return HeadPlan(
        path=_path(device, work.dtype),
        backward="dense" if exact else "sparse",
        tolerance=tolerance,
        chunks=_chunks(device, work),
        forward_tile=forward_tile,
        backward_tile=backward_tile,
        dense_columns=_dense_columns(work, backward_tile.columns),
    )


def _path(device: Device, dtype: torch.dtype) -> Literal["reference", "triton"]:
    usable = device.kind == "cuda" and device.has_triton and device.capability >= (8, 0)
    return "triton" if usable and dtype in (torch.bfloat16, torch.float16, torch.float32) else "reference"


def _chunks(device: Device, work: Workload) -> Chunks:
    """Few rows take more columns: a chunk's bytes stay the same, and the matrix products large."""
    budget = _CPU_CHUNK_BYTES if device.kind == "cpu" else _DEVICE_CHUNK_BYTES
    height = max(1, min(work.rows, _CHUNK_ROWS))
    itemsize = 8 if work.dtype == torch.float64 else 4
    width = max(TILE, budget // (height * itemsize))
    return Chunks(height, max(1, min(width, work.vocabulary)))


def _descriptor_tile(device: Device, work: Workload, *, wide: bool) -> ProductTile | None:
    """Hopper's tile, as large as registers allow: operand bytes per product keep the tensor cores fed."""
    if not work.aligned or device.capability[0] not in (9, 10):
        return None
    if work.dtype == torch.float32:
        tile = ProductTile(64, 128, 32, warps=4, stages=3, group=16, descriptors=True)
    else:
        tile = ProductTile(128, 256 if wide else 128, 64, warps=8, stages=4, group=16, descriptors=True)
    results = tile.rows * TILE * work.dtype.itemsize
    needed = tile.shared_bytes(work.dtype.itemsize) + results + _SCRATCH_BYTES
    return tile if needed <= device.shared_memory else None


def _pointer_tile(work: Workload, *, backward: bool) -> ProductTile:
    """Everyone else's tile. Addresses, and operands that pass through registers, leave room for less."""
    if work.dtype == torch.float32:
        return ProductTile(64, 128, 32, warps=8, stages=3, group=8, descriptors=False)
    if backward:
        return ProductTile(64, 128, 64, warps=8, stages=3, group=8, descriptors=False)
    return ProductTile(128, 128, 32, warps=8, stages=4, group=8, descriptors=False)


def _dense_columns(work: Workload, multiple: int) -> int:
    """Columns of logit gradient that fit the workspace, in whole tiles."""
    per_tile = max(work.rows, 1) * multiple * work.dtype.itemsize
    tiles = max(1, _DENSE_WORKSPACE_BYTES // per_tile)
    return min(tiles, -(-max(work.vocabulary, 1) // multiple)) * multiple
