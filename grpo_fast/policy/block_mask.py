"""FlexAttention's block mask of a packed batch, from the ranges that its tokens see.

`create_block_mask` asks every pair of tokens, which takes about ten bytes for each of T². Here the pairs that
see each other in a block are counted from two numbers a token, so that memory and work grow as T + (T/128)².
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # tokens; FlexAttention's default

Range = tuple[Tensor, Tensor]
"""(T,) int64 each: every token sees the tokens from the first index up to the second, which it does not."""


def block_mask(ranges: Sequence[Range], sees: Callable[..., Tensor]) -> BlockMask:
    """What `create_block_mask` makes of `sees` over one sequence of T tokens.

    Args:
        ranges: what each token sees; a token's own ranges do not overlap.
        sees: (batch, head, query, key) -> bool, the same for a single pair; asked in blocks of which a part
            is seen.
    """
    from torch.nn.attention.flex_attention import BlockMask

    pairs = visible_pairs(ranges)[None, None]
    full = pairs == BLOCK * BLOCK
    total = len(ranges[0][0])
    return BlockMask.from_kv_blocks(
        *_listed((pairs > 0) & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(total, total),
    )


def visible_pairs(ranges: Sequence[Range]) -> Tensor:
    """(n, n) int32, n = ceil(T / BLOCK): how many pairs of each block of queries and of keys are seen.

    Of the keys below b, block k holds clamp(b - BLOCK·k, 0, BLOCK), which as a function of k changes in two
    places. Those changes are summed over the queries of a block first, then along k: nothing is of size T·n.
    """
    starts = ranges[0][0]
    blocks = -(-len(starts) // BLOCK)
    steps = torch.zeros(blocks, blocks + 2, dtype=torch.int32, device=starts.device)
    row = torch.arange(len(starts), device=starts.device) // BLOCK * steps.shape[1]
    for start, end in ranges:
        for bound, sign in ((end, 1), (start, -1)):
            place, rest = row + bound // BLOCK, (bound % BLOCK).to(torch.int32)
            steps.view(-1).index_add_(0, place, rest - BLOCK, alpha=sign)
            steps.view(-1).index_add_(0, place + 1, rest, alpha=-sign)
    return steps.cumsum(1, dtype=torch.int32)[:, :blocks]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and their indices, those first."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)
