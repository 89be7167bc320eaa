"""Choose the head's path, tiles and memory, as a pure function of sizes and of the device's facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_fast.head.tuning import SHARED_MEMORY, Sizes, sizes_for
from grpo_fast.kernels import MOST_TILES, TILE, ProductTile, SparseConfig

Backend = Literal["reference", "triton"]

DEFAULT_TOLERANCE = 2.5
"""Bound of the sampled gradient's error, in units of the error of rounding the logit gradient to bfloat16.

The error measured on two models is a third to a half of this bound.
"""

_CPU_CHUNK_BYTES = 8 << 20
_DEVICE_CHUNK_BYTES = 256 << 20
# Of a frozen head's exponentials. Fewer rows would give a large GPU too few tiles of their product with W.
_JACOBIAN_BYTES, _JACOBIAN_ROWS = 640 << 20, 2048
_CHUNK_ROWS = 512
_DIVERGENCE_CHUNKS = 16
_DENSE_WORKSPACE_BYTES = 192 << 20
_SCRATCH_BYTES = 1 << 10  # shared memory the compiler takes besides operands and results: barriers


@dataclass(frozen=True)
class Device:
    """Facts of a device."""

    kind: str  # "cpu", "cuda", ...
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    shared_memory: int = 0  # bytes one program may use
    has_triton: bool = False
    gfx: str = ""  # an AMD GPU's architecture

    @property
    def architecture(self) -> str:
        """Key of the table of sizes."""
        return self.gfx or "sm_{}{}".format(*self.capability)


@dataclass(frozen=True)
class Workload:
    """Facts of a call."""

    rows: int
    vocabulary: int
    dtype: torch.dtype
    softcap: bool = False
    extra_statistics: int = 0  # beyond log-probability and log-sum-exp
    entropy_gradient: bool = False  # there is an upstream gradient of the entropy
    mean_gradient: bool = False  # of the mean logit: not sparse
    tolerance: float | None = None  # None for DEFAULT_TOLERANCE; read where kernels run
    aligned: bool = True  # operands fit tensor descriptors: unit stride along H, rows on 16 bytes
    keep: bool = False  # the forward may keep N·V elements for the backward
    jacobian: bool = False  # only the log-probability is differentiated, and only in the hidden states
    hidden_size: int = 2048
    trainable: bool = True  # the weight takes a gradient; read by the memory planner


@dataclass(frozen=True)
class Chunks:
    """Rows and vocabulary entries of the reference path's logits at one time."""

    rows: int
    columns: int  # whole tiles, or all
    cached_rows: int = 1  # rows of two heads' full logits that fit the caches

    def of_rows(self, count: int) -> list[slice]:
        return range_of(count, self.rows)

    def of_columns(self, vocabulary: int) -> list[slice]:
        return range_of(vocabulary, self.columns)


@dataclass(frozen=True)
class HeadPlan:
    backend: Backend
    tolerance: float  # 0 if nothing is sampled
    keep: bool  # the forward keeps exponentials for the backward
    jacobian: bool  # the forward computes dlogprob/dhidden, and the backward scales it
    jacobian_rows: int  # rows of exponentials that the kernels hold at one time for the jacobian
    chunks: Chunks  # of the reference path
    forward_tile: ProductTile
    backward_tile: ProductTile
    dense_columns: int  # vocabulary entries per chunk of the dense backward
    sparse: SparseConfig  # of the sparse backward

    @property
    def backward(self) -> Literal["dense", "sparse"]:
        """The backward of this plan; dense is exact."""
        return "sparse" if self.tolerance else "dense"


def plan_head(device: Device, work: Workload) -> HeadPlan:
    """Plan one call."""
    backend = head_backend(device, work.dtype)
    tolerance = DEFAULT_TOLERANCE if work.tolerance is None else work.tolerance
    if backend == "reference" or work.mean_gradient or work.vocabulary > MOST_TILES * TILE:
        tolerance = 0.0
    stores = backend == "triton" and not work.softcap
    exact = tolerance == 0 or (work.keep and stores)
    jacobian = work.jacobian and exact and (stores or backend == "reference")
    keep = work.keep and stores and not jacobian
    # Three statistics, one with a softcap or stored exponentials, or the entropy gradient need the registers
    # of half a tile.
    forward_wide = work.extra_statistics < 3
    if work.softcap or keep or jacobian:  # with tensor memory these alone spill in a wide tile
        forward_wide = work.extra_statistics < 1 and device.capability[0] != 10
    backward_wide = not (work.softcap or work.entropy_gradient or work.mean_gradient)
    sizes = sizes_for(device.architecture, work.dtype, device.shared_memory)
    forward_tile = _descriptor_tile(device, work, sizes, wide=forward_wide) or sizes.pointer_forward
    backward_tile = _descriptor_tile(device, work, sizes, wide=backward_wide) or sizes.pointer_backward
    row_bytes = max(work.vocabulary, 1) * work.dtype.itemsize
    most_rows = min(_JACOBIAN_ROWS, _JACOBIAN_BYTES // row_bytes)
    return HeadPlan(
        backend=backend,
        tolerance=tolerance,
        keep=keep,
        jacobian=jacobian,
        jacobian_rows=max(1, most_rows // forward_tile.rows) * forward_tile.rows,
        chunks=_chunks(device, work),
        forward_tile=forward_tile,
        backward_tile=backward_tile,
        dense_columns=dense_columns(work, backward_tile.columns),
        sparse=sizes.sparse,
    )


def head_backend(device: Device, dtype: torch.dtype) -> Backend:
    """Return the backend: kernels for CUDA devices of capability 8.0 or more and AMD GPUs in the table."""
    known = device.gfx in SHARED_MEMORY if device.gfx else device.capability >= (8, 0)
    usable = device.kind == "cuda" and device.has_triton and known
    return "triton" if usable and dtype in (torch.bfloat16, torch.float16, torch.float32) else "reference"


def _chunks(device: Device, work: Workload) -> Chunks:
    """Choose chunks of constant bytes: fewer rows take more columns, which keeps the products large.

    On a GPU the weight's columns in the accumulator's dtype keep to the same bytes.
    """
    budget = _CPU_CHUNK_BYTES if device.kind == "cpu" else _DEVICE_CHUNK_BYTES
    height = max(1, min(work.rows, _CHUNK_ROWS))
    itemsize = 8 if work.dtype == torch.float64 else 4
    longest = height if device.kind == "cpu" else max(height, work.hidden_size)
    width = max(TILE, budget // (longest * itemsize) // TILE * TILE)
    return Chunks(height, max(1, min(width, work.vocabulary)))


def divergence_chunks(kind: str, vocabulary: int, hidden_size: int, accumulator: torch.dtype) -> Chunks:
    """Choose rows whose full logits of both heads keep to the bytes of `_DIVERGENCE_CHUNKS` chunks."""
    budget, itemsize = (_CPU_CHUNK_BYTES if kind == "cpu" else _DEVICE_CHUNK_BYTES), accumulator.itemsize
    of_row = 2 * itemsize * max(vocabulary, 1)
    rows = max(1, _DIVERGENCE_CHUNKS * budget // of_row)
    width = max(TILE, budget // (max(rows, hidden_size) * itemsize) // TILE * TILE)
    return Chunks(rows, max(1, min(width, vocabulary)), max(1, budget // (4 * of_row)))


def range_of(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _descriptor_tile(device: Device, work: Workload, sizes: Sizes, *, wide: bool) -> ProductTile | None:
    """Return a large tile for tensor descriptors, or None if they do not fit the call or the device."""
    tile = sizes.wide if wide else sizes.narrow
    if tile is None or not work.aligned:
        return None
    results = tile.rows * TILE * work.dtype.itemsize
    needed = tile.shared_bytes(work.dtype.itemsize) + results + _SCRATCH_BYTES
    return tile if needed <= device.shared_memory else None


def dense_columns(work: Workload, multiple: int) -> int:
    """Return the columns of logit gradients that fit the workspace, in whole tiles."""
    per_tile = max(work.rows, 1) * multiple * work.dtype.itemsize
    tiles = max(1, _DENSE_WORKSPACE_BYTES // per_tile)
    return min(tiles, -(-max(work.vocabulary, 1) // multiple)) * multiple
