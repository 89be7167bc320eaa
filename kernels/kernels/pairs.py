"""Lists of the kept pairs: by vocabulary tile for products, and by row for sums over a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import STRATUM, TILE
from .select import ActivePairs, draw_length, is_certain, log2_weight, word_of_tile

if TYPE_CHECKING:
    from . import SparseConfig


class Pairs(NamedTuple):
    """The kept pairs, sorted by tile and then row, with their places in the order by row and then tile.

    A row's places end before its `row_ends`; it has `room` places, of which its pairs take the first. If the
    rows need more places than `capacity`, `fits` is zero and the lists are empty.
    """

    rows: Tensor  # (capacity,) int32
    places: Tensor  # (capacity,) int32
    tiles: Tensor  # (capacity,) int32, by place, as the next
    scales: Tensor  # (capacity,) float32 factor of the pair's gradient: one, or a sampled pair's weight
    offsets: Tensor  # (T + 1,) int32: pairs of tile t are rows[offsets[t]:offsets[t + 1]]
    block_offsets: Tensor  # (T + 1,) int32: the same in blocks of `config.pair_rows`
    block_tile: Tensor  # (blocks,) int32: tile of every block
    fits: Tensor  # (1,) int32

    @property
    def capacity(self) -> int:
        return self.rows.numel()


def list_pairs(live: ActivePairs, capacity: int, config: SparseConfig) -> Pairs:
    """List the pairs, if the rows' rooms sum to at most `capacity`."""
    rows, tiles = live.count.numel(), live.tile_counts.numel()

    def empty(size: int) -> Tensor:
        return live.bits.new_empty(size)

    blocks = capacity // config.pair_rows + tiles  # every tile's last block may be partly filled
    pairs = Pairs(
        empty(capacity), empty(capacity), empty(capacity), live.small.new_empty(capacity),
        empty(tiles + 1), empty(tiles + 1), empty(blocks), empty(1),
    )  # fmt: skip
    _lay_out[(1,)](
        live.tile_counts, live.row_ends, pairs, rows, tiles, capacity,
        PAIR_ROWS=config.pair_rows, BLOCK=triton.next_power_of_2(max(tiles, 32)), num_warps=8,
    )  # fmt: skip
    _list_tile[(tiles,)](live, pairs, rows, BLOCK=_ROWS)
    if rows:
        _scale_pairs[(rows,)](live, pairs, rows, TILE=TILE, BLOCK=32, num_warps=1)
    return pairs


_ROWS = 2048
_STRATUM = tl.constexpr(STRATUM)


@triton.jit(do_not_specialize=["rows", "tiles", "capacity"])
def _lay_out(
    tile_counts,  # (T,) int32
    row_ends,  # (N,) int64
    pairs,  # `Pairs`: offsets and `fits` are written
    rows,
    tiles,
    capacity,
    PAIR_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the offsets of every tile's pairs and blocks, in one program."""
    enough = tl.load(row_ends + rows - 1, mask=rows > 0, other=0) <= capacity
    tl.store(pairs.fits, enough.to(tl.int32))
    tile = tl.arange(0, BLOCK)
    count = tl.load(tile_counts + tile, mask=tile < tl.where(enough, tiles, 0), other=0)
    tl.store(pairs.offsets + tile + 1, tl.cumsum(count), mask=tile < tiles)
    tl.store(pairs.block_offsets + tile + 1, tl.cumsum(tl.cdiv(count, PAIR_ROWS)), mask=tile < tiles)
    tl.store(pairs.offsets, 0)
    tl.store(pairs.block_offsets, 0)


@triton.jit(do_not_specialize=["rows"])
def _list_tile(live, pairs, rows, BLOCK: tl.constexpr):
    """List a tile's rows in ascending order and their places, and the tile of each of its blocks."""
    if tl.load(pairs.fits) == 0:
        return
    tile = tl.program_id(0)
    at = tl.load(pairs.offsets + tile)
    lower = (1 << (tile % 32)) - 1
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        word = word_of_tile(live.bits, tile, row, rows)
        kept = (word >> (tile % 32)) & 1
        mask = kept != 0
        first = tl.load(live.row_ends + row, mask=mask, other=0).to(tl.int32)
        first -= tl.load(live.room + row, mask=mask, other=0)
        rank = tl.load(live.rank_base + (tile // 32).to(tl.int64) * rows + row, mask=mask, other=0)
        place = first + rank + _popcount(word & lower)
        index = at + tl.cumsum(kept) - kept
        tl.store(pairs.rows + index, row, mask=mask)
        tl.store(pairs.places + index, place, mask=mask)
        tl.store(pairs.tiles + place, tile, mask=mask)
        at += tl.sum(kept)
    first_block, last_block = tl.load(pairs.block_offsets + tile), tl.load(pairs.block_offsets + tile + 1)
    for start in range(first_block, last_block, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(pairs.block_tile + block, tl.full((BLOCK,), 0, tl.int32) + tile, mask=block < last_block)


@triton.jit(do_not_specialize=["rows"])
def _scale_pairs(live, pairs, rows, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the scale of each pair of a row: one, or the inverse of its sampling probability."""
    row, masses = tl.program_id(0), live.masses
    count = tl.where(tl.load(pairs.fits) != 0, tl.load(live.count + row), 0)
    first = tl.load(live.row_ends + row) - tl.load(live.room + row)
    h, e = None, None
    if masses.entropy_gradient is not None:
        h, e = tl.load(masses.entropy + row), tl.load(masses.entropy_gradient + row)
    lse, steepest = tl.load(masses.logsumexp + row), tl.load(masses.slope + row)
    mass, target = tl.load(masses.mass + row), tl.load(masses.targets + row)
    log2_threshold = tl.load(live.threshold.numbers)
    line = masses.tile_lse + row.to(tl.int64) * masses.row_stride
    for start in range(0, count, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        present = pair < count
        tile = tl.load(pairs.tiles + first + pair, mask=present, other=0)
        here = tl.load(line + tile, mask=present, other=0.0)
        log2_w = log2_weight(here, lse, mass, steepest, h, e)
        holds_target = (target < masses.vocabulary) & (target // TILE == tile)
        certain = is_certain(log2_w, log2_threshold) | holds_target
        word = tl.load(live.twice + (tile // 32).to(tl.int64) * rows + row, mask=present, other=0)
        points = 1 + ((word >> (tile % 32)) & 1)
        drawn = points * _STRATUM / tl.maximum(draw_length(log2_w, log2_threshold), 1)
        tl.store(pairs.scales + first + pair, tl.where(certain, 1.0, drawn), mask=present)


@triton.jit
def _popcount(bits):
    """Count the set bits of every int32."""
    value = bits.to(tl.uint32, bitcast=True)
    value = value - ((value >> 1) & 0x55555555)
    value = (value & 0x33333333) + ((value >> 2) & 0x33333333)
    value = (value + (value >> 4)) & 0x0F0F0F0F
    value = value + (value >> 8)
    return ((value + (value >> 16)) & 0x3F).to(tl.int32)
