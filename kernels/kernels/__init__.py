"""Triton kernels of the LM head. Only `grpo_fast.head` calls them. This module itself needs no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = 128
"""Vocabulary columns of a mass tile: the unit whose probability is known, and that is kept or left out."""

BF16_ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16."""

LEVELS = 48
"""Thresholds a row chooses from: 2^-4, 2^-4.5, …, 2^-27, and zero."""

CANDIDATES = 64
"""Multipliers of the batch's balance that are tried: half octaves down from its budget, and zero."""

PAIR_SHARE = 0.7
"""Of the tolerance, what whole pairs may spend; single entries of the hidden gradient spend the rest."""

EMIT_SHARE = 1 / 32
"""Of a row's threshold for tiles, the probability above which a single entry is weighed by itself."""


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

    No buffer depends on the data. Lists of live pairs and of entries have a fixed capacity; a batch that
    exceeds one is left to the dense path by a flag on the device (`Pairs.overflow`, `SparseGradients.dense`),
    never truncated. Defaults: of bfloat16.
    """

    pair_rows: int = 128  # gathered rows per program of the pair gradient
    pair_depth: int = 64
    pair_warps: int = 8
    pair_stages: int = 3
    pair_programs: int = 1  # per multiprocessor: its registers fill one
    weight_columns: int = 128  # columns of H per program of dW
    weight_depth: int = 64  # gathered rows per step of dW
    weight_warps: int = 8
    weight_stages: int = 3
    weight_programs: int = 2
    row_entries: int = 4  # entries in flight per program of dX
    row_warps: int = 16
    pair_density: float = 0.2  # live pairs that fit, of all N·T; denser rows go to the dense path
    entries_per_row: int = 352  # entries that fit, on average over the rows
    least_pairs: int = 1 << 18  # capacities of small problems
    least_entries: int = 1 << 20
    chunk_bytes: int = 64 << 20  # logit gradients held at one time
    cuda_rows: bool = False  # dX by `csrc/`, which must be usable
    cuda_curve: bool = False  # the selection's mass curve, likewise

    def pair_capacity(self, rows: int, tiles: int) -> int:
        """Live pairs that fit."""
        return max(math.ceil(self.pair_density * rows * tiles), min(rows * tiles, self.least_pairs), 1)

    def entry_capacity(self, rows: int) -> int:
        """Entries of dX's sparse product that fit."""
        return max(self.entries_per_row * rows, self.least_entries)

    def block_capacity(self, rows: int, tiles: int) -> int:
        """Row blocks of the pair gradient: every tile's last block may be partly filled."""
        return self.pair_capacity(rows, tiles) // self.pair_rows + tiles

    def chunk_pairs(self, rows: int, itemsize: int) -> int:
        """Pairs by which a chunk's workspace advances; a tile that crosses the border adds at most `rows`."""
        return max(self.chunk_bytes // (TILE * itemsize) - rows, rows, 1)

    def chunks(self, rows: int, tiles: int, itemsize: int) -> int:
        return math.ceil(self.pair_capacity(rows, tiles) / self.chunk_pairs(rows, itemsize))

    def workspace_bytes(self, rows: int, tiles: int, itemsize: int, *, weight: bool) -> int:
        """Bytes the selection and the backward hold beside their inputs and outputs.

        Args:
            weight: the weight takes a gradient, as the hidden states do.
        """
        pairs = self.pair_capacity(rows, tiles)
        total = 4 * pairs + 8 * math.ceil(tiles / 32) * rows + 4 * self.block_capacity(rows, tiles)
        total += 2 * 4 * LEVELS * rows + 12 * pairs + 2 * 8 * self.entry_capacity(rows)
        if weight:
            total += self.chunk_workspace_pairs(rows, tiles, itemsize) * TILE * itemsize
        return total

    def chunk_workspace_pairs(self, rows: int, tiles: int, itemsize: int) -> int:
        """Pairs whose logit gradients are held at one time."""
        return rows + min(self.chunk_pairs(rows, itemsize), self.pair_capacity(rows, tiles))
