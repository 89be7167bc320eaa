"""The selection keeps all large pairs, and samples the small ones by their size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from grpo_fast.kernels import ENTRY_SHARE, TILE, SparseConfig
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients
from grpo_fast.kernels.pairs import Pairs, list_pairs
from grpo_fast.kernels.select import ActivePairs, select_live

from tests.head import selection

HALF = SparseConfig()
SHAPES = {
    "peaked": {"peak": 60.0, "spread": 1.0},
    "mixed": {"peak": 30.0},
    "flat": {"peak": 0.0, "spread": 0.01},
    "target": {"peak": -30.0},  # it is improbable
    "entropy": {"peak": 30.0, "g_entropy": 0.1},
    "transformed": {"peak": 30.0, "transformed": True},
}


class Selected(NamedTuple):
    rows: RowCoefficients
    live: ActivePairs
    pairs: Pairs


def select(head, tolerance: float = 1.0, *, capacity: int = 1 << 20, config=HALF) -> Selected:
    rows = row_coefficients(head.call, *head.upstream)
    live = select_live(head.call, rows, head.tile_lse, tolerance=tolerance)
    pairs = list_pairs(live, min(capacity, 2 * head.tile_lse.numel()), config)
    return Selected(rows, live, pairs)


def scales(selected: Selected) -> torch.Tensor:
    """(N, T) scale of every pair, from the per-tile lists; zero where it is not kept."""
    pairs, offsets = selected.pairs, selected.pairs.offsets.tolist()
    found = torch.zeros(selected.live.count.numel(), len(offsets) - 1)
    for tile, (begin, end) in enumerate(pairwise(offsets)):
        places = pairs.places[begin:end].long()
        assert (pairs.tiles[places] == tile).all()
        found[pairs.rows[begin:end].long().cpu(), tile] = pairs.scales[places].cpu()
    return found


def tile_sizes(head) -> torch.Tensor:
    """(N, T) float64: Σ|dL/d(x·w)| over each tile."""
    return torch.stack([tile.abs().sum(1) for tile in head.logit_gradient.split(TILE, 1)], 1).cpu()


def target_tiles(head) -> torch.Tensor:
    tiles = torch.arange(head.tile_lse.shape[1])
    inside = (head.targets >= 0) & (head.targets < head.weight.shape[0])
    return (head.targets.cpu()[:, None] // TILE == tiles) & inside.cpu()[:, None]


def working_rows(head) -> torch.Tensor:
    return ((head.targets >= 0) & ((head.g != 0) | (head.g_entropy is not None))).cpu()


def in_torch(head, tolerance: float) -> selection.Selection:
    index = head.gradient.live().nonzero().squeeze(1)
    salt = selection.salt_of(head.call, head.gradient)
    call, rows = head.call.rows(index), head.gradient.rows(index)
    return selection.choose(call, rows, index, salt, tolerance, head.tile_lse[index])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tolerance", [0.25, 16.0, 1e4])
@pytest.mark.drawn(8)
def test_selection_equals_the_oracles_and_keeps_to_the_tolerance(make_head, shape, tolerance):
    head = make_head(40, 2000, **SHAPES[shape])

    selected = select(head, tolerance)

    expected, index = in_torch(head, tolerance), head.gradient.live().nonzero().squeeze(1)
    numbers, found = selected.live.threshold.numbers.cpu(), scales(selected)
    torch.testing.assert_close(numbers[1], expected.entry[0, 0].cpu(), rtol=1e-4, atol=0)
    torch.testing.assert_close(numbers[2], expected.unit.cpu(), rtol=1e-4, atol=0)
    same = torch.isclose(found[index.cpu()], expected.scale.float().cpu(), rtol=1e-3)
    assert same.float().mean() > 0.995  # the others lie where rounding decides
    assert not found[~working_rows(head)].any()
    torch.testing.assert_close(selected.live.small.sum(), expected.small.float(), rtol=1e-3, atol=1e-4)
    assert selected.live.small.sum().sqrt() * numbers[2] <= tolerance * (1 + 1e-4)
    drawn = found[(found != 0) & (found != 1)]
    assert selected.live.largest.max() == (drawn.max() if drawn.numel() else 1)


@pytest.mark.parametrize("shape", ["mixed", "entropy", "transformed"])
def test_large_pairs_and_targets_are_kept_and_weights_bound_gradients(make_head, shape):
    head = make_head(40, 2000, 16, **SHAPES[shape])

    selected = select(head, 16.0)

    found, threshold = scales(selected), float(selected.live.threshold.numbers[1]) / ENTRY_SHARE
    sizes, others = tile_sizes(head), ~target_tiles(head)
    index = head.gradient.live().nonzero().squeeze(1)
    weights = torch.zeros_like(sizes)
    weights[index.cpu()] = selection.pair_weights(
        head.call.rows(index), head.gradient.rows(index), head.tile_lse[index]
    ).double().cpu()  # fmt: skip
    assert (sizes <= weights * (1 + 1e-4) + 1e-12)[others].all()
    assert (found[others & (weights > threshold * 1.001)] == 1).all()
    assert (found[target_tiles(head) & working_rows(head)[:, None]] == 1).all()
    small = others & (weights < threshold * 0.999) & (found != 0)
    once = threshold / weights[small]
    assert small.any()
    times = found[small].double() / once
    assert torch.isclose(times, times.round(), rtol=0, atol=0.02).all()
    assert {*times.round().tolist()} <= {1, 2}


def test_lists_agree_with_the_bits_and_both_orders_with_each_other(make_head):
    head = make_head(30, 4300, 16, peak=30.0, g_logsumexp=True)

    selected = select(head, 10.0)

    _, marked, pairs = selected
    live = scales(selected) != 0
    words = marked.bits.cpu().long()
    tiles = torch.arange(live.shape[1])
    assert torch.equal((words[tiles // 32] >> (tiles % 32)[:, None]).T & 1 == 1, live)
    assert torch.equal(marked.count.cpu(), live.sum(1).int())
    assert (marked.room >= marked.count).all()
    assert torch.equal(marked.row_ends, marked.room.cumsum(0))
    assert torch.equal(marked.rank_base[1].cpu(), live[:, :32].sum(1).int())
    assert torch.equal(marked.tile_counts.cpu(), live.sum(0).int())
    for begin, end in pairwise(pairs.offsets.tolist()):
        assert (pairs.rows[begin:end].diff() > 0).all()
    for row, (end, room, count) in enumerate(
        zip(marked.row_ends.tolist(), marked.room.tolist(), marked.count.tolist(), strict=True)
    ):
        of_row = pairs.tiles[end - room : end - room + count].long().cpu()
        assert torch.equal(of_row, live[row].nonzero().squeeze(1))
    blocks = -(-live.sum(0) // HALF.pair_rows)
    assert torch.equal(pairs.block_offsets[1:].cpu(), blocks.cumsum(0).int())
    assert torch.equal(pairs.block_tile[: int(blocks.sum())].cpu(), tiles.repeat_interleave(blocks).int())


def test_half_a_percent_of_the_pairs_is_kept_at_any_tolerance(make_head):
    head = make_head(48, 4096, 16, peak=0.0, spread=0.3)
    head.g[1:] *= 1e-7  # one row has all of the gradient

    numbers, expected = select(head, 1e9).live.threshold.numbers.cpu(), in_torch(head, 1e9)

    assert expected.small > 0.004 * expected.scale.numel()
    torch.testing.assert_close(numbers[2], expected.unit.cpu(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 4096, 4097])
def test_tolerance_zero_keeps_all_pairs_but_empty_ones(make_head, vocabulary):
    head = make_head(20, vocabulary, 8, peak=30.0)
    head.tile_lse[:, 1:2] = -torch.inf

    selected = select(head, 0.0)

    expected = working_rows(head)[:, None].repeat(1, -(-vocabulary // TILE))
    expected[:, 1:2] &= target_tiles(head)[:, 1:2]
    assert torch.equal(scales(selected), expected.float())
    assert (selected.live.small == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_keeps_all_and_changes_no_other(make_head, value):
    head = make_head(30, 2000, peak=40.0)
    head.g[8], head.targets[8] = 1.0, 3
    without = replace(head, logprob=head.logprob.index_fill(0, torch.tensor([8]).to(head.g.device), 0.0))
    without.tile_lse[8] = -torch.inf  # a row that is sure of its target weighs nothing
    before = select(without).live.threshold.numbers
    if value == torch.inf:
        head.g[8] = value
    else:
        head.tile_lse[8] = head.logsumexp[8] = head.logprob[8] = value

    selected = select(head)

    assert (scales(selected)[8] == 1).all() or value == torch.inf
    torch.testing.assert_close(selected.live.threshold.numbers, before, rtol=1e-6, atol=0)


def test_a_target_in_another_shard_has_no_tile_here(make_head):
    head = make_head(20, 200, peak=0.0, g_logsumexp=True)
    shard = replace(head, targets=head.targets.masked_fill(head.targets >= 0, 200))

    rows = row_coefficients(shard.call, *shard.upstream)

    works = shard.targets >= 0
    target = head.g_logsumexp[works] * head.logprob[works].exp()
    torch.testing.assert_close(rows.target[works], target, rtol=0, atol=1e-5)
    expected = (rows.mass[works].double() / 2).square().sum()
    torch.testing.assert_close(rows.squares.sum(), expected)
    assert (scales(select(shard, 1e4)) != 0).float().mean() < 0.6


@pytest.mark.parametrize("missing", [0, 1])
def test_pairs_without_room_are_flagged_and_lists_are_empty(make_head, missing):
    head = make_head(24, 3000, peak=0.0)
    selected = select(head)
    room, total = int(selected.live.row_ends[-1]), int(selected.live.count.sum())

    pairs = select(head, capacity=room - missing).pairs

    assert pairs.fits.item() == 1 - missing
    assert pairs.offsets[-1].item() == pairs.block_offsets.any() * total == total * (1 - missing)


def test_a_selection_is_bit_equal_and_another_batch_draws_anew(make_head):
    head = make_head(20, 3000, 16, peak=20.0)

    first, second = select(head, 8.0), select(head, 8.0)

    for name in ("bits", "twice", "rank_base", "small"):
        assert torch.equal(getattr(first.live, name), getattr(second.live, name)), name
    targets = head.targets.clone()
    targets[0] = (targets[0] + 1) % 3000
    assert not torch.equal(select(replace(head, targets=targets), 8.0).live.bits, first.live.bits)


def test_equal_rows_draw_independently(make_head):
    head = make_head(40, 3000, **SHAPES["flat"])
    row = int(head.gradient.live().nonzero()[0])
    equal = {
        name: getattr(head, name)[row].expand_as(getattr(head, name)).clone()
        for name in ("hidden", "targets", "g", "tile_lse", "logsumexp", "logprob", "entropy")
    }

    found = scales(select(replace(head, **equal), 200.0)) != 0

    assert 0.05 < found.float().mean() < 0.8
    assert len({tuple(line) for line in found.tolist()}) > 30


@pytest.mark.parametrize(
    "options", [{}, {"transformed": True}, {"g_logsumexp": True}, {"g_entropy": 0.5}], ids=str
)
def test_rows_have_the_coefficients_of_their_logit_gradient(make_head, options):
    head = make_head(60, 300, peak=40.0, **options)
    head.logprob[0] = -1e-7  # 1 − p is rounding noise here
    expected = head.gradient

    rows = row_coefficients(head.call, *head.upstream)

    terms = 1e-6 if head.g_logsumexp is not None or head.g_entropy is not None else 0  # two, that may cancel
    torch.testing.assert_close(rows.target, expected.target, rtol=1e-5, atol=terms)
    assert torch.equal(rows.mass, -expected.mass)
    if head.g_entropy is not None:
        assert torch.equal(rows.entropy_gradient, expected.entropy_gradient)
    works = head.targets >= 0
    slope = head.logit_scale if head.inv_temperature is None else head.inv_temperature * head.logit_scale
    torch.testing.assert_close(rows.slope[works], torch.as_tensor(slope).expand_as(rows.slope)[works])
    norm = selection.norm_of(head.call, expected)
    torch.testing.assert_close(rows.squares.sum().sqrt().float(), norm, rtol=1e-4, atol=0)
    salt = selection.salt_of(head.call._replace(seed=None), head.gradient)
    assert rows.salts.sum() & 0xFFFFFFFF == salt
