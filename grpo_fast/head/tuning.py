"""Block sizes, warps and stages of every kernel, by architecture and precision, without autotuning.

All sizes compile without spills for their architecture, except dX at hidden sizes above 8,192. None was
measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from grpo_fast.kernels import ProductTile, SparseConfig

SHARED_MEMORY = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448,
    "sm_120": 101_376, "gfx942": 65_536, "gfx950": 163_840,
}  # fmt: skip
"""Bytes of shared memory one program may use, by architecture: NVIDIA's in ascending order, then AMD's."""

Precision = Literal["half", "float32"]


@dataclass(frozen=True)
class Sizes:
    """Launch sizes of the kernels."""

    pointer_forward: ProductTile  # for operands that descriptors cannot address
    pointer_backward: ProductTile
    sparse: SparseConfig
    wide: ProductTile | None = None  # X Wᵀ by tensor descriptors; None if the architecture has none
    narrow: ProductTile | None = None  # the same, if a softcap or many statistics need the registers


def _pointers(rows: int, depth: int, warps: int, stages: int) -> ProductTile:
    return ProductTile(rows, 128, depth, warps, stages, group=8, descriptors=False)


def _descriptors(rows: int, columns: int, depth: int, warps: int, stages: int) -> ProductTile:
    return ProductTile(rows, columns, depth, warps, stages, group=16, descriptors=True)


_ONE_PROGRAM = SparseConfig(pair_rows=64, pair_programs=1, pair_registers=None)
_OF_FLOATS = replace(_ONE_PROGRAM, pair_depth=32, weight_columns=64, weight_depth=32, weight_stages=2)
_OF_FLOATS = replace(_OF_FLOATS, row_width=512)
_FLOAT_TILES = 2 * (_pointers(64, 32, warps=8, stages=3),)  # forward and backward
_HALF_TILES = _pointers(128, 32, warps=8, stages=4), _pointers(64, 64, warps=8, stages=3)
_HOPPER_NARROW = _descriptors(128, 128, 64, warps=8, stages=4)

_AMPERE: dict[Precision, Sizes] = {
    "half": Sizes(*_HALF_TILES, _ONE_PROGRAM),
    "float32": Sizes(*_FLOAT_TILES, _OF_FLOATS),
}
_AMD: dict[Precision, Sizes] = {
    "half": Sizes(
        *2 * (_pointers(128, 64, warps=4, stages=2),),
        replace(_ONE_PROGRAM, pair_warps=4, pair_stages=2, weight_stages=2),
    ),
    "float32": Sizes(
        *2 * (_pointers(128, 16, warps=8, stages=2),), replace(_OF_FLOATS, pair_warps=4, pair_stages=2)
    ),
}
TABLE: dict[str, dict[Precision, Sizes]] = {
    "sm_80": _AMPERE,
    "sm_86": _AMPERE,
    "sm_89": _AMPERE,
    "sm_90": {
        "half": Sizes(
            *_HALF_TILES,
            SparseConfig(),
            wide=_descriptors(128, 256, 64, warps=8, stages=4),
            narrow=_HOPPER_NARROW,
        ),
        "float32": Sizes(
            *_FLOAT_TILES,
            _OF_FLOATS,
            wide=_descriptors(64, 128, 32, warps=4, stages=3),
            narrow=_descriptors(64, 128, 32, warps=4, stages=3),
        ),
    },
    "sm_100": {
        "half": Sizes(
            *_HALF_TILES,
            _ONE_PROGRAM,
            wide=_descriptors(128, 256, 64, warps=8, stages=3),
            narrow=_HOPPER_NARROW,
        ),
        "float32": Sizes(*_FLOAT_TILES, _OF_FLOATS),
    },
    "sm_120": {
        "half": Sizes(_HALF_TILES[0], _pointers(64, 32, warps=8, stages=4), _ONE_PROGRAM),
        "float32": Sizes(*_FLOAT_TILES, replace(_OF_FLOATS, pair_depth=16)),
    },
    "gfx942": _AMD,
    "gfx950": _AMD,
}


def sizes_for(architecture: str, dtype: torch.dtype, shared_memory: int | None = None) -> Sizes:
    """Return the sizes for a device and a dtype.

    An NVIDIA GPU without a row takes that of the newest architecture before it that fits its shared memory,
    or else the row that needs the least.

    Args:
        architecture: as in the table, or unknown.
        shared_memory: bytes one program may use; None: no limit.
    """
    nvidia = {int(name[3:]): name for name in TABLE if name.startswith("sm_")}
    if architecture.startswith("gfx"):
        fits = [architecture] if architecture in TABLE else []
    else:
        room = max(SHARED_MEMORY.values()) if shared_memory is None else shared_memory
        before = [name for number, name in nvidia.items() if number <= int(architecture[3:])]
        fits = [name for name in before if SHARED_MEMORY[name] <= room]
    nearest = fits[-1] if fits else min(nvidia.values(), key=SHARED_MEMORY.__getitem__)
    return TABLE[nearest]["half" if dtype.itemsize == 2 else "float32"]
