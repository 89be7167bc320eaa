"""Triton kernels of the LM head, called by `grpo_fast.head` only. This module itself needs no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = 128
"""Vocabulary columns of a mass tile, the unit of selection, whose probability the forward computes."""

BF16_ROUNDING = 2.0**-7 * math.sqrt(1 / (32 * math.log(2)))
"""Root mean square relative error of rounding to bfloat16, over log-uniform magnitudes."""

BINS = 128
"""Quarter octaves of the pairs' histogram, from the batch's norm down to 2^-31.5 of it."""

STRATUM = 1 << 18
"""Resolution of sampling probabilities w/τ."""

ENTRY_SHARE = 0.25
"""Threshold of dX's single entries, relative to that of pairs."""

PAIR_BUDGET = 0.85
"""Share of the squared tolerance for pairs; the rest is for the entries of dX."""

LEAST_DENSITY = 0.005
"""Least share of pairs that are kept, whatever the tolerance: fewer would save no time."""

GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio, a hash's multiplier for neighbouring integers."""

MOST_TILES = 4096
"""Most tiles of a sampled vocabulary: a row's strata have 32-bit numbers."""

SEGMENT = 512
"""Pairs of a row whose entries are numbered by 16 bits."""


@dataclass(frozen=True)
class ProductTile:
    """One program's tile of X Wᵀ, and how its operands are loaded."""

    rows: int
    columns: int  # a multiple of TILE
    depth: int  # of H per step
    warps: int
    stages: int
    group: int  # row blocks that share a weight's tiles, for reuse in L2
    descriptors: bool  # tensor descriptors (TMA) instead of pointer loads

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the pipelined operands."""
        return self.stages * (self.rows + self.columns) * self.depth * itemsize


@dataclass(frozen=True)
class SparseConfig:
    """Tiles, warps and capacities of the sparse backward. Defaults are for bfloat16 on Hopper."""

    pair_rows: int = 128  # gathered rows per program of the pair gradient
    pair_depth: int = 64  # of H per step
    pair_warps: int = 8
    pair_stages: int = 3
    pair_programs: int = 2  # per multiprocessor
    pair_registers: int | None = 128  # bound per thread, so that `pair_programs` fit; None: no bound
    weight_columns: int = 128  # columns of H per program of dW
    weight_depth: int = 64  # gathered rows per step of dW
    weight_warps: int = 8
    weight_stages: int = 3
    row_entries: int = 1  # entries per step of dX
    row_bytes: int = 96 << 10  # shared memory for the weight's rows in flight
    row_width: int = 1024  # columns of H per warp of dX
    usual_density: float = 0.04  # share of kept pairs with room before they are counted
    most_density: float = 0.1  # share with room after that; beyond it the batch is dense
    least_pairs: int = 1 << 19  # pairs with room in any case

    def usual_pairs(self, rows: int, tiles: int) -> int:
        return max(math.ceil(self.usual_density * rows * tiles), min(rows * tiles, self.least_pairs), 1)

    def most_pairs(self, rows: int, tiles: int) -> int:
        return max(math.ceil(self.most_density * rows * tiles), self.usual_pairs(rows, tiles))

    def workspace_bytes(self, pairs: int, rows: int, tiles: int, itemsize: int) -> int:
        """Return the bytes of selection and backward for so many pairs, without inputs and outputs."""
        blocks = pairs // self.pair_rows + tiles
        of_rows = 12 * math.ceil(tiles / 32) + 4 * 12
        return (TILE * itemsize + 16) * pairs + of_rows * rows + 4 * blocks
