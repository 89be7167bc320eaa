"""Which pairs are live, and that what they leave out is what the certificate says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING, PAIR_SHARE, TILE, SparseConfig
from grpo_fast.kernels.select import Pairs, select_pairs

HALF = SparseConfig()
SHAPES = {
    "peaked": {"peak": 60.0, "spread": 1.0},
    "mixed": {"peak": 30.0},
    "flat": {"peak": 0.0, "spread": 0.01},
    "target": {"peak": -30.0},  # it is improbable
}


def select(head, tolerance: float = 1.0, **options) -> Pairs:
    options = {"config": HALF} | options
    return select_pairs(head.problem, head.gradient, head.tile_lse, tolerance=tolerance, **options)


def live_matrix(pairs: Pairs) -> torch.Tensor:
    """(N, T) bool, read from the per-tile lists."""
    offsets = pairs.offsets.tolist()
    live = torch.zeros(pairs.left_out.numel(), len(offsets) - 1, dtype=torch.bool)
    for tile, (begin, end) in enumerate(pairwise(offsets)):
        live[pairs.rows[begin:end].long().cpu(), tile] = True
    return live


def tile_mass(head) -> torch.Tensor:
    """(N, T) float64."""
    return torch.stack([tile.sum(1) for tile in head.probability.split(TILE, 1)], 1).cpu()


def target_tiles(head) -> torch.Tensor:
    tiles = torch.arange(head.tile_lse.shape[0])
    inside = (head.targets >= 0) & (head.targets < head.weight.shape[0])
    return (head.targets.cpu()[:, None] // TILE == tiles) & inside.cpu()[:, None]


def working_rows(head) -> torch.Tensor:
    return ((head.targets >= 0) & (head.g != 0)).cpu()


@pytest.mark.parametrize(
    ("shape", "tolerance"), [("peaked", 1.0), ("mixed", 0.1), ("mixed", 50.0), ("flat", 1.0), ("target", 1e6)]
)
def test_what_pairs_leave_out_is_exact_the_least_of_the_row_and_within_the_tolerance(
    make_head, shape, tolerance
):
    head = make_head(90, 2000, **SHAPES[shape])

    pairs = select(head, tolerance)

    live, mass, working = live_matrix(pairs), tile_mass(head), working_rows(head)
    left_out = (mass * ~live).sum(1)[working]
    torch.testing.assert_close(pairs.left_out.cpu().double()[working], left_out, rtol=1e-4, atol=1e-9)
    gradient = 2 * head.g.double() * torch.expm1(head.logprob.double())  # Σ_v |G_v| of each row
    error = head.g.cpu().double()[working] * left_out
    allowed = tolerance * BF16_ROUNDING * gradient.cpu()[working].norm()
    assert error.norm() <= PAIR_SHARE * allowed * (1 + 1e-4)
    assert pairs.metrics()["error_bound"] <= PAIR_SHARE * tolerance * (1 + 1e-4)
    lightest_live = mass.masked_fill(~live | target_tiles(head), 2.0).amin(1)
    assert ((mass * ~live).amax(1) <= lightest_live)[working].all()
    assert live[target_tiles(head) & working[:, None]].all()
    assert not live[~working].any() and (~working).any()
    density = {"peaked": (0, 0.4), "mixed": (0, 1), "flat": (0.9, 1), "target": (0, 1)}[shape]
    assert density[0] <= live[working].float().mean() <= density[1]


def test_lists_agree_with_the_bits_and_are_sorted(make_head):
    head = make_head(150, 4500, peak=30.0, g_logsumexp=True)

    pairs = select(head, 10.0)

    live = live_matrix(pairs)
    words = pairs.live_bits.cpu().long()
    tiles = torch.arange(live.shape[1])
    assert torch.equal((words[tiles // 32] >> (tiles % 32)[:, None]).T & 1 == 1, live)
    assert torch.equal(pairs.live_count.cpu(), live.sum(1).int())
    assert torch.equal(pairs.row_ends.cpu(), live.sum(1).cumsum(0))
    assert torch.equal(pairs.rank_base[1].cpu(), live[:, :32].sum(1).int())
    assert pairs.total.item() == live.sum()
    offsets = pairs.offsets.tolist()
    for begin, end in pairwise(offsets):
        assert (pairs.rows[begin:end].diff() > 0).all()


def test_tolerance_zero_leaves_out_only_what_is_zero_in_float32(make_head):
    head = make_head(60, 2000, peak=40.0)
    head.tile_lse[1] = -torch.inf

    pairs = select(head, 0.0)

    live = live_matrix(pairs)[working_rows(head)]
    keeps = torch.arange(live.shape[1]) != 1
    assert live[:, keeps].all()
    assert torch.equal(live[:, 1], target_tiles(head)[working_rows(head), 1])
    assert (pairs.left_out == 0).all()


def test_a_row_of_nan_is_live_everywhere_and_its_neighbours_are_not_touched(make_head):
    head = make_head(60, 2000, peak=40.0)
    # A row that is sure of its target leaves out nothing either, and weighs as little with the others.
    head.tile_lse[:, 8], head.logsumexp[8], head.logprob[8] = -torch.inf, 0.0, 0.0
    before = live_matrix(select(head))
    head.tile_lse[:, 8] = torch.nan
    head.logsumexp[8] = torch.nan
    head.logprob[8] = torch.nan

    after = live_matrix(select(head))

    others = torch.arange(60) != 8
    assert after[8].all()
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 4096, 4097])
def test_vocabularies_around_tile_and_word_edges(make_head, vocabulary):
    head = make_head(20, vocabulary, 8)

    live = live_matrix(select(head, 0.0))

    assert torch.equal(live.any(1), working_rows(head))
    assert live.shape[1] == -(-vocabulary // TILE)


def test_a_target_in_another_shard_is_live_nowhere(make_head):
    head = make_head(20, 200, peak=0.0, g_logsumexp=True)
    shard = replace(
        head, targets=head.targets.masked_fill(head.targets >= 0, 200), logsumexp=head.logsumexp + 60
    )

    pairs = select(shard)

    assert pairs.total.item() == 0
    assert (pairs.left_out[working_rows(head)] > 0).all()


def test_too_many_pairs_are_flagged_and_leave_every_list_empty(make_head):
    head = make_head(60, 3000, peak=0.0)

    pairs = select(head, config=replace(HALF, pair_density=0.01, least_pairs=0))

    assert pairs.overflow.item() == 1
    assert pairs.total.item() > pairs.rows.numel()
    assert pairs.offsets.any().item() is False
    assert pairs.block_offsets.any().item() is False
    assert pairs.chunk_tiles.any().item() is False


def test_every_tile_is_in_one_chunk_that_fits_its_workspace(make_head):
    head = make_head(40, 3000, peak=10.0, dtype=torch.bfloat16)
    config = replace(HALF, chunk_bytes=200 * TILE * 2)

    pairs = select(head, 0.0, config=config)

    first = pairs.chunk_tiles.tolist()
    assert first == sorted(first) and first[0] == 0 and first[-1] == 24 and len(first) > 3
    base = [chunk * config.chunk_pairs(40, 2) - 40 for chunk in range(len(first))]
    for chunk, (begin, end) in enumerate(pairwise(first)):
        if end > begin:
            assert pairs.offsets[begin] >= base[chunk]
            assert pairs.offsets[end] - base[chunk] <= config.chunk_workspace_pairs(40, 24, 2)


def test_selected_rows_are_bit_equal_from_run_to_run(make_head):
    head = make_head(90, 2000, peak=30.0)

    first, second = select(head), select(head)

    for name in ("offsets", "live_bits", "rank_base", "log_threshold", "left_out", "norm"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_workspaces_of_a_large_batch_stay_below_300_mib():
    rows, tiles = 16_384, 1_187  # V = 151,936

    backward = HALF.workspace_bytes(rows, tiles, 2, weight=True)

    assert backward + 4 * rows * tiles < 300 << 20  # with the forward's tile masses


def test_rows_with_more_live_tiles_than_the_list_has_room_for_are_set_apart(make_head):
    head = make_head(60, 900, peak=30.0, spread=1.0)
    room = replace(HALF, pair_density=0.5, least_pairs=0)
    whole = select(head, config=replace(HALF, pair_density=1.0))

    pairs = select(head, config=room, split_rows=True)

    limit = room.pair_capacity(60, 8) // 60
    dense = whole.live_count > limit
    assert torch.equal(pairs.dense_rows, dense)
    assert torch.equal(pairs.live_count, torch.where(dense, 0, whole.live_count))
    assert pairs.overflow == 0 and pairs.total == pairs.live_count.sum()
    assert not pairs.left_out[dense].any()
    assert torch.equal(pairs.left_out[~dense], whole.left_out[~dense])
    density = pairs.metrics()["density"] * 60 * 8
    assert torch.isclose(density, (pairs.total[0] + 8 * dense.sum()).float())
