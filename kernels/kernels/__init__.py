"""Triton kernels of the LM head. Only `grpo_fast.head` calls them. This module itself needs no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = 128
"""Vocabulary columns of a mass tile: the unit whose probability is known, and that is kept or left out."""

BF16_ROUNDING = 2.0**-7 * math.sqrt(1 / (32 * math.log(2)))
"""Root mean square of what rounding to bfloat16 changes, relative to numbers of evenly spread size."""

BINS = 128
"""Quarter octaves in which pairs are counted, relative to the batch's norm: from it down to 2^-31.5 of it."""

STRATUM = 1 << 18
"""Integers of a unit of w/τ: a pair is drawn with a probability of so many parts."""

ENTRY_SHARE = 0.25
"""The threshold of dX's single entries, of that of whole pairs."""

PAIR_BUDGET = 0.85
"""Share of the square of the tolerance that pairs may use. The entries of dX may use the rest."""

LEAST_DENSITY = 0.005
"""Of the pairs that hold anything so many are kept whatever the tolerance, as fewer would save no time."""

GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: what sets the hashes of neighbours apart."""

MOST_TILES = 4096
"""Of a vocabulary whose pairs can be drawn: a row's strata have numbers of 32 bits."""

SEGMENT = 512
"""Pairs of a row whose entries have numbers of 16 bits."""


@dataclass(frozen=True)
class ProductTile:
    """One program's tile of X Wᵀ and how it is fed."""

    rows: int
    columns: int  # a multiple of TILE
    depth: int  # of H per step
    warps: int
    stages: int
    group: int  # row blocks that share the weight's tiles before the next ones: reuse in L2
    descriptors: bool  # tensor descriptors (TMA) instead of pointer loads

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of the pipelined operands."""
        return self.stages * (self.rows + self.columns) * self.depth * itemsize


@dataclass(frozen=True)
class SparseConfig:
    """Tiles, warps and capacities of the sparse backward. `depth` is the step of a product's inner loop.

    Defaults: of bfloat16.
    """

    pair_rows: int = 128  # gathered rows per program of the pair gradient
    pair_depth: int = 64
    pair_warps: int = 8
    pair_stages: int = 3
    pair_programs: int = 2  # per multiprocessor
    pair_registers: int | None = 128  # per thread at most, so that `pair_programs` fit; None: no bound
    weight_columns: int = 128  # columns of H per program of dW
    weight_depth: int = 64  # gathered rows per step of dW
    weight_warps: int = 8
    weight_stages: int = 3
    row_entries: int = 1  # entries per step of dX
    row_bytes: int = 96 << 10  # of the weight's rows in flight: of shared memory
    row_width: int = 1024  # columns of H per warp of dX
    usual_density: float = 0.04  # kept pairs, of all N·T, for which there is room before they are counted
    most_density: float = 0.1  # for which room is made then; beyond it the batch is dense
    least_pairs: int = 1 << 19  # for which there is room in any case

    def usual_pairs(self, rows: int, tiles: int) -> int:
        return max(math.ceil(self.usual_density * rows * tiles), min(rows * tiles, self.least_pairs), 1)

    def most_pairs(self, rows: int, tiles: int) -> int:
        return max(math.ceil(self.most_density * rows * tiles), self.usual_pairs(rows, tiles))

    def workspace_bytes(self, pairs: int, rows: int, tiles: int, itemsize: int) -> int:
        """Bytes the selection and the backward hold for so many pairs beside their inputs and outputs."""
        blocks = pairs // self.pair_rows + tiles
        of_rows = 12 * math.ceil(tiles / 32) + 4 * 12
        return (TILE * itemsize + 16) * pairs + of_rows * rows + 4 * blocks
