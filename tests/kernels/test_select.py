"""Which pairs are live, and that what they leave out is what the certificate says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING, LEVELS, PAIR_SHARE, ROW_TILES, TILE, SparseConfig, balance
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients
from grpo_fast.kernels.pairs import Pairs, list_pairs
from grpo_fast.kernels.select import Live, select_live
from grpo_fast.kernels.sparse import certify
from grpo_fast.kernels.sparse_pairs import SparseOperands

HALF = SparseConfig()
SHAPES = {
    "peaked": {"peak": 60.0, "spread": 1.0},
    "mixed": {"peak": 30.0},
    "flat": {"peak": 0.0, "spread": 0.01},
    "target": {"peak": -30.0},  # it is improbable
}


class Selected(NamedTuple):
    rows: RowCoefficients
    live: Live
    pairs: Pairs
    operands: SparseOperands

    @property
    def certificate(self) -> torch.Tensor:
        numbers = torch.empty(4, device=self.live.left_out.device)
        certify(self.operands, self.live.left_out, numbers)
        return numbers


def select(head, tolerance: float = 1.0, *, capacity: int = 1 << 20, config=HALF, **options) -> Selected:
    """As many pairs as there are, unless told otherwise."""
    rows = row_coefficients(head.problem, *head.upstream)
    live = select_live(head.problem, rows, head.tile_lse, tolerance=tolerance, **options)
    pairs = list_pairs(live, min(capacity, head.tile_lse.numel()), config)
    return Selected(rows, live, pairs, SparseOperands.of(head.problem, rows, live, pairs, config))


def live_matrix(selected: Selected) -> torch.Tensor:
    """(N, T) bool, read from the per-tile lists."""
    pairs, offsets = selected.pairs, selected.pairs.offsets.tolist()
    live = torch.zeros(selected.live.count.numel(), len(offsets) - 1, dtype=torch.bool)
    for tile, (begin, end) in enumerate(pairwise(offsets)):
        live[pairs.rows[begin:end].long().cpu(), tile] = True
    return live


def tile_mass(head) -> torch.Tensor:
    """(N, T) float64."""
    return torch.stack([tile.sum(1) for tile in head.probability.split(TILE, 1)], 1).cpu()


def target_tiles(head) -> torch.Tensor:
    tiles = torch.arange(head.tile_lse.shape[1])
    inside = (head.targets >= 0) & (head.targets < head.weight.shape[0])
    return (head.targets.cpu()[:, None] // TILE == tiles) & inside.cpu()[:, None]


def working_rows(head) -> torch.Tensor:
    return ((head.targets >= 0) & (head.g != 0)).cpu()


@pytest.mark.parametrize(
    ("shape", "tolerance"), [("peaked", 1.0), ("mixed", 0.1), ("mixed", 50.0), ("flat", 1.0), ("target", 1e6)]
)
@pytest.mark.drawn(3)
def test_what_pairs_leave_out_is_exact_the_least_of_the_row_and_within_the_tolerance(
    make_head, shape, tolerance
):
    head = make_head(50, 2000, **SHAPES[shape])

    selected = select(head, tolerance)

    live, mass, working = live_matrix(selected), tile_mass(head), working_rows(head)
    left_out = (mass * ~live).sum(1)[working]
    torch.testing.assert_close(selected.live.left_out.cpu().double()[working], left_out, rtol=1e-4, atol=1e-9)
    gradient = 2 * head.g.double() * torch.expm1(head.logprob.double())  # Σ_v |G_v| of each row
    error = head.g.cpu().double()[working] * left_out
    allowed = tolerance * BF16_ROUNDING * gradient.cpu()[working].norm()
    assert error.norm() <= PAIR_SHARE * allowed * (1 + 1e-4)
    assert selected.certificate[3] <= PAIR_SHARE * tolerance * (1 + 1e-4)
    exactly = float(tolerance * error.norm() / allowed)
    assert selected.certificate[3].item() == pytest.approx(exactly, rel=1e-3, abs=1e-7)
    lightest_live = mass.masked_fill(~live | target_tiles(head), 2.0).amin(1)
    assert ((mass * ~live).amax(1) <= lightest_live)[working].all()
    assert live[target_tiles(head) & working[:, None]].all()
    assert not live[~working].any() and (~working).any()
    density = {"peaked": (0, 0.6), "mixed": (0, 1), "flat": (0.9, 1), "target": (0, 1)}[shape]
    assert density[0] <= live[working].float().mean() <= density[1]


def test_lists_agree_with_the_bits_and_both_orders_with_each_other(make_head):
    head = make_head(70, 4500, peak=30.0, g_logsumexp=True)

    selected = select(head, 10.0)

    _, marked, pairs, _ = selected
    live = live_matrix(selected)
    words = marked.bits.cpu().long()
    tiles = torch.arange(live.shape[1])
    assert torch.equal((words[tiles // 32] >> (tiles % 32)[:, None]).T & 1 == 1, live)
    assert torch.equal(marked.count.cpu(), live.sum(1).int())
    assert torch.equal(marked.row_ends.cpu(), live.sum(1).cumsum(0))
    assert torch.equal(marked.rank_base[1].cpu(), live[:, :32].sum(1).int())
    assert torch.equal(marked.tile_counts.cpu(), live.sum(0).int())
    total = int(live.sum())
    assert marked.found.tolist() == [total, 0]
    for begin, end in pairwise(pairs.offsets.tolist()):
        assert (pairs.rows[begin:end].diff() > 0).all()
    by_row, by_tile = live.nonzero().T, live.T.nonzero().T
    assert torch.equal(pairs.tiles[:total].cpu().long(), by_row[1])
    places = pairs.places[:total].cpu().long()
    assert torch.equal(by_row[:, places], by_tile.flip(0))
    blocks = -(-live.sum(0) // HALF.pair_rows)
    assert torch.equal(pairs.block_offsets[1:].cpu(), blocks.cumsum(0).int())
    assert torch.equal(pairs.block_tile[: int(blocks.sum())].cpu(), tiles.repeat_interleave(blocks).int())


def test_a_curve_is_at_most_a_quarter_octave_above_the_masses_below_each_level(make_head, rng, monkeypatch):
    head = make_head(24, 9000, peak=0.0)
    head.tile_lse.sub_(18 * torch.rand(head.tile_lse.shape, generator=rng).to(head.tile_lse.device))
    head.tile_lse[:, 3], head.tile_lse[:, 5] = head.logsumexp - 9.5 * 0.6931471805599453, -torch.inf
    curves = []
    strike = balance.balance
    monkeypatch.setattr(
        "grpo_fast.kernels.select.balance", lambda curve, *rest: curves.append(curve) or strike(curve, *rest)
    )

    select(head)

    working = working_rows(head)
    log2 = ((head.tile_lse - head.logsumexp[:, None]) / 0.6931471805599453).cpu().double()[working]
    counted = ~target_tiles(head)[working]
    curve = curves[0].cpu().double()[working]
    assert (curve[:, -1] == 0).all()
    for level in range(LEVELS - 1):
        edge = -4 - level / 2
        if (log2 - edge).abs().min() > 1e-4:
            below = torch.where(counted & (log2 < edge), log2.exp2(), 0).sum(1)
            least = torch.where(counted & (log2 < edge) & (log2 > -36), log2.exp2(), 0).sum(1)
            assert (curve[:, level] >= below * (1 - 1e-5)).all()
            assert (curve[:, level] <= least * 2**0.25 * (1 + 1e-5) + 71 * 2**-35.75).all()


def test_tolerance_zero_leaves_out_only_what_is_zero_in_float32(make_head):
    head = make_head(30, 2000, peak=40.0)
    head.tile_lse[:, 1] = -torch.inf

    selected = select(head, 0.0)

    live = live_matrix(selected)[working_rows(head)]
    keeps = torch.arange(live.shape[1]) != 1
    assert live[:, keeps].all()
    assert torch.equal(live[:, 1], target_tiles(head)[working_rows(head), 1])
    assert (selected.live.left_out == 0).all()


def test_a_row_of_nan_is_live_everywhere_and_its_neighbours_are_not_touched(make_head):
    head = make_head(30, 2000, peak=40.0)
    # A row that is sure of its target leaves out nothing either, and weighs as little with the others.
    head.tile_lse[8], head.logsumexp[8], head.logprob[8] = -torch.inf, 0.0, 0.0
    before = live_matrix(select(head))
    head.tile_lse[8] = torch.nan
    head.logsumexp[8] = torch.nan
    head.logprob[8] = torch.nan

    after = live_matrix(select(head))

    others = torch.arange(30) != 8
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

    selected = select(shard)

    assert selected.live.found.tolist() == [0, 0]
    assert (selected.live.left_out[working_rows(head)] > 0).all()


@pytest.mark.parametrize("missing", [0, 1])
def test_pairs_that_do_not_fit_are_flagged_and_leave_the_lists_empty(make_head, missing):
    head = make_head(24, 3000, peak=0.0)
    total = select(head).live.found[0].item()

    pairs = select(head, capacity=total - missing).pairs

    assert pairs.fits.item() == 1 - missing
    assert pairs.offsets[-1].item() == pairs.block_offsets.any() * total == total * (1 - missing)


def test_selected_rows_are_bit_equal_from_run_to_run(make_head):
    head = make_head(40, 2000, peak=30.0)

    first, second = select(head), select(head)

    for part, again, names in (
        (first.live, second.live, ("bits", "rank_base", "left_out")),
        (first.pairs, second.pairs, ("offsets", "block_offsets")),
        (first.rows, second.rows, ("mass", "target", "squares")),
    ):
        for name in names:
            assert torch.equal(getattr(part, name), getattr(again, name)), name


@pytest.mark.parametrize(("transformed", "g_logsumexp"), [(False, False), (True, False), (False, True)])
def test_rows_have_the_coefficients_of_their_logit_gradient(make_head, transformed, g_logsumexp):
    head = make_head(60, 300, peak=40.0, transformed=transformed, g_logsumexp=g_logsumexp)
    head.logprob[0] = -1e-7  # 1 − p is rounding noise here
    expected, live = head.gradient, head.gradient.live()

    rows = row_coefficients(head.problem, *head.upstream)

    terms = 1e-6 if g_logsumexp else 0  # two, that may cancel
    torch.testing.assert_close(rows.target, expected.target, rtol=1e-5, atol=terms)
    assert torch.equal(rows.mass, -expected.mass)
    slope = head.logit_scale if head.inv_temperature is None else head.inv_temperature * head.logit_scale
    torch.testing.assert_close(rows.scale, expected.mass.abs() * slope)
    size = (expected.target.abs() - expected.mass.abs() * torch.expm1(head.logprob))[live]
    torch.testing.assert_close(rows.squares.sum(), size.square().sum())


@pytest.mark.parametrize("asked", [True, False])
def test_rows_with_more_live_tiles_than_asked_for_or_than_16_bits_number_are_set_apart(
    make_head, monkeypatch, asked
):
    head = make_head(28, 900, peak=30.0, spread=1.0)
    whole = select(head).live
    assert ROW_TILES * TILE == 1 << 16
    if not asked:
        monkeypatch.setattr("grpo_fast.kernels.select.ROW_TILES", 4)

    selected = select(head, row_tiles=4 if asked else 100)

    live, dense = selected.live, whole.count > 4
    assert dense.any() and not dense.all()
    assert torch.equal(live.dense, dense)
    assert torch.equal(live.count, torch.where(dense, 0, whole.count))
    assert live.found.tolist() == [live.count.sum(), dense.sum()]
    assert not live.left_out[dense].any()
    assert torch.equal(live.left_out[~dense], whole.left_out[~dense])
    numbers = selected.certificate
    assert torch.isclose(numbers[0] * 28 * 8, (live.found[0] + 8 * dense.sum()).float())
    active = working_rows(head)
    torch.testing.assert_close(numbers[1].cpu(), live.left_out.cpu()[active].sum() / active.sum())
    assert numbers[2] == live.left_out.max()
