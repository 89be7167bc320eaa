"""Stateless random numbers: hashes of a row's values and position."""

from __future__ import annotations

import triton
import triton.language as tl

from . import GOLDEN

_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def mix(word):
    """Hash uint32 by two rounds of multiply and shift: after one, neighbors' draws are correlated."""
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def spread(place):
    """Map neighboring integers to distant uint32."""
    return place.to(tl.uint32) * _GOLDEN


@triton.jit
def bits_of(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def row_seed(logsumexp, row, salt):
    """Seed a row by its value, its position and its batch's salt."""
    return mix(bits_of(logsumexp) + spread(row) + tl.load(salt))


@triton.jit
def entry_seed(seed):
    """Seed the draws of a row's entries, independent of those of its tiles."""
    return mix(seed ^ 0xFFFFFFFF)
