"""Triton kernels of the LM head. Only `grpo_fast.head` calls them. This module itself needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 128
"""Vocabulary columns of a mass tile: the unit whose probability is known, and that is kept or left out."""


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
