"""Random numbers without state: hashes of what is drawn for."""

from __future__ import annotations

import triton
import triton.language as tl

from . import GOLDEN

_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def mix(word):
    """Two rounds of multiply and shift, uint32: with one, the draws of neighbours hang together."""
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word *= 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def spread(place):
    """Of neighbouring integers, uint32 far apart."""
    return place.to(tl.uint32) * _GOLDEN


@triton.jit
def bits_of(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def row_seed(logsumexp, row, salt):
    """Of a row, from what it holds and where it lies; the salt is its batch's."""
    return mix(bits_of(logsumexp) + spread(row) + tl.load(salt))


@triton.jit
def entry_seed(seed):
    """Of the draws among a row's entries, which are none of those among its tiles."""
    return mix(seed ^ 0xFFFFFFFF)
