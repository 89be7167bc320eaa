"""What a forward and backward of the head should take on an H200, from instruction counts; not measured.

A throw-away prototype of the kernels was measured there, at N = 16,384, H = 2048, V = 151,936. Products over
gathered rows and dX take its times, scaled by what is kept; the forward loses to its epilogue what the
prototype's lost to its own, by instructions; the selection is bound by the instructions it issues; the rest
streams its bytes. On the counts of `dry_head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_fast.kernels import TILE

from .dry_head import DENSITY, ENTRIES, SIZES

if TYPE_CHECKING:
    from .aot import Report

ARCHITECTURE, CASE, TOKENS = "sm_90", "certified, bfloat16", 16_384
UNIT = 680e12  # floating point operations a second of cuBLAS
ISSUED = 0.65 * 132 * 4 * 1.755e9  # warp instructions a second, of what the schedulers can issue
STREAMED = 0.75 * 4.8e12  # bytes a second
LAUNCH = 2e-6  # seconds of one, between kernels that follow one another
# Of the prototype: instructions of its epilogue and what they cost, and seconds of pairs, dW and dX.
_EPILOGUE, _LOST, _DEPTH = 1118, 0.038, 2048
_PAIRS, _PAIR_GRADIENTS, _WEIGHT_GRADIENT = 0.037 * TOKENS * 1187, 0.9e-3, 0.9e-3
_ENTRIES, _HIDDEN_GRADIENT = 40 * TOKENS, 0.9e-3
_BLOCK = 256  # tiles that a warp of the selection takes at a time
BEFORE = {896: 1.49, 2048: 1.32, 4096: 1.26}
"""An earlier estimate, from the machine code of the backward that dropped: at tolerance 1, 1.8 % of the
pairs, 119 entries a row, and one row in 190 live in so many tiles that it was set apart."""


def seconds(rows: Sequence[Report], depth: int, vocabulary: int) -> dict[str, float]:
    """Of each part, H and V given."""
    kernel = {row.kernel: row for row in rows if row.case == CASE}
    tiles = -(-vocabulary // TILE)
    pairs, entries = DENSITY * TOKENS * tiles, ENTRIES * TOKENS
    product = 2.0 * TOKENS * vocabulary * depth / UNIT
    epilogue = _LOST * kernel["forward_kernel"].epilogue / _EPILOGUE * _DEPTH / depth
    passes = TOKENS * -(-tiles // _BLOCK) * (kernel["_count_pairs"].step + kernel["_mark_live"].step)
    size = depth / _DEPTH
    moved = 4 * TOKENS * depth * 2 + 2 * TOKENS * tiles * 4 + 3 * pairs * TILE * 2 + vocabulary * depth * 2
    return {
        "forward": product * (1 + epilogue),
        "selection": passes / ISSUED,
        "pair gradients": _PAIR_GRADIENTS * pairs / _PAIRS * size,
        "dW": _WEIGHT_GRADIENT * pairs / _PAIRS * size,
        "dX": _HIDDEN_GRADIENT * entries / _ENTRIES * size,
        "copies and lists": moved / STREAMED + 17 * LAUNCH,
    }


def table(rows: Sequence[Report]) -> str:
    """In units of one product X Wᵀ."""
    found = {depth: (seconds(rows, depth, vocabulary), vocabulary) for depth, vocabulary in SIZES}
    lines = ["| | " + " | ".join(f"H={depth}" for depth in found) + " |", "|---|" + "---|" * len(found)]
    units = {
        depth: {name: took * UNIT / (2.0 * TOKENS * vocabulary * depth) for name, took in parts.items()}
        for depth, (parts, vocabulary) in found.items()
    }
    for name in next(iter(units.values())):
        lines.append(f"| {name} | " + " | ".join(f"{of[name]:.3f}" for of in units.values()) + " |")
    lines.append("| together | " + " | ".join(f"{sum(of.values()):.2f}" for of in units.values()) + " |")
    lines.append("| before | " + " | ".join(f"{BEFORE[depth]:.2f}" for depth in units) + " |")
    return "\n".join(lines)
