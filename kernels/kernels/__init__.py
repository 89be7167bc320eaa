"""Triton kernels of the LM head. Only `grpo_fast.head` calls them. This module itself needs no Triton."""

from __future__ import annotations

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
