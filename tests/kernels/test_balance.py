"""One budget, a level for every row."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from grpo_fast.kernels import LEVELS
from grpo_fast.kernels.balance import balance, count_octaves, is_below, level_of, store_curve

from grpo_fast.head import certified


@triton.jit
def _curve(masses, curve, so_far, K, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    mass = tl.load(masses + row * K + place, mask=place < K, other=1.0)
    counts = count_octaves(tl.log2(mass), place < K)
    store_curve(curve, row, counts, so_far, FACTOR=FACTOR)


@triton.jit
def _below(masses, levels, below, K, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    mass = tl.load(masses + row * K + place, mask=place < K, other=1.0)
    found = is_below(tl.log2(mass), tl.load(levels + row))
    tl.store(below + row * K + place, found, mask=place < K)


@triton.jit
def _levels(curve, c, kappa, levels):
    row = tl.program_id(0)
    tl.store(levels + row, level_of(curve, row, tl.load(c + row), tl.load(kappa)))


def curve_of(masses: torch.Tensor, so_far: float = 0.0, factor: float = 1.0) -> torch.Tensor:
    rows, size = masses.shape
    curve = masses.new_empty(rows, LEVELS)
    _curve[(rows,)](masses, curve, so_far, size, FACTOR=factor, BLOCK=triton.next_power_of_2(size))
    return curve


def below(masses: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(masses.shape, dtype=torch.bool, device=masses.device)
    _below[(len(masses),)](
        masses, levels, found, masses.shape[1], BLOCK=triton.next_power_of_2(masses.shape[1])
    )
    return found


def levels_of(curve: torch.Tensor, c: torch.Tensor, squares: torch.Tensor, share: float) -> torch.Tensor:
    kappa = balance(curve, c, squares, share)
    levels = torch.empty(len(curve), dtype=torch.int32, device=curve.device)
    _levels[(len(curve),)](curve, c, kappa, levels)
    return levels


def mixed_masses(rng: torch.Generator, rows: int = 80) -> torch.Tensor:
    """Rows from peaked to flat, (N, 400) float32."""
    spread = 1 + 7 * torch.rand(rows, 1, generator=rng)
    return (spread * torch.randn(rows, 400, generator=rng)).softmax(1)


def test_the_curve_is_that_of_the_torch_path_and_above_the_masses_by_at_most_a_quarter_octave(rng, device):
    masses = mixed_masses(rng, 20).to(device)
    masses[:, 0], masses[:, 1], masses[:, 2] = 0.0, 2.0**-9.5, torch.nan

    curve = curve_of(masses)

    torch.testing.assert_close(curve, certified._curve(masses), rtol=1e-5, atol=1e-12)
    counted = masses.nan_to_num(1.0)
    for level in range(LEVELS - 1):
        exact = torch.where(counted < 2.0 ** -(4 + level / 2), counted, 0).sum(1)
        assert (curve[:, level] >= exact * (1 - 1e-5)).all()
        assert (curve[:, level] <= exact * 2**0.25 * (1 + 1e-5) + 400 * 2**-35.75).all()
    torch.testing.assert_close(curve_of(masses, 0.25, 1.5), 0.25 + 1.5 * curve)


def test_below_a_level_is_less_than_its_threshold(rng, device):
    masses = 2 ** (-45 * torch.rand(LEVELS, 200, generator=rng)).to(device)
    levels = torch.arange(LEVELS, dtype=torch.int32, device=device)
    thresholds = torch.where(levels < LEVELS - 1, 2.0 ** -(4 + levels / 2), 0)
    masses[:, 0], masses[:, 1], masses[:, 2], masses[:, 3] = thresholds, 0.0, torch.nan, torch.inf
    whole = (levels % 2 == 0)[:, None]  # the others are rounded
    near = ((masses / thresholds[:, None]).log2().abs() < 1e-5) & ~(whole & (masses == thresholds[:, None]))

    found = below(masses, levels)

    exact = (masses < thresholds[:, None]) | (masses == 0)
    assert torch.equal(found[~near], exact[~near])


@pytest.mark.parametrize("share", [1e-3, 0.03, 0.5])
def test_what_is_left_out_is_within_the_budget_and_spends_most_of_it(rng, device, share):
    masses, c = mixed_masses(rng).to(device), torch.randn(80, generator=rng).to(device)
    parts = torch.rand(70, generator=rng).to(device)
    parts /= parts.sum()  # of a norm of one

    levels = levels_of(curve_of(masses), c, parts, share)

    left_out = torch.where(below(masses, levels), masses, 0).sum(1)
    spent = (c * left_out).square().sum()
    assert 0.05 * share**2 <= spent <= share**2 * 1.0001


@pytest.mark.parametrize("share", [0.0, 1e-2, 1.0])
def test_a_rows_level_is_that_of_the_torch_path(rng, device, share):
    masses, c = mixed_masses(rng).to(device), torch.logspace(-2, 2, 80, device=device)
    c[::9] = 0
    curve, norm = curve_of(masses), torch.ones(1, device=device)

    for already in (0.0, 0.1):  # left out in any case, and too much
        found = levels_of(curve + already, c, norm, share)
        expected = certified.balance(curve + already, c, share * norm[0])

        same = found == expected
        assert same.float().mean() > 0.98  # the others lie on the border, which rounding moves
        assert (found[c != 0] == LEVELS - 1).all() == (already > 0 or share == 0)


def test_a_row_of_nan_leaves_out_nothing_and_does_not_spoil_the_others(rng, device):
    curve, c = curve_of(mixed_masses(rng).to(device)), torch.ones(80, device=device)
    c[7] = torch.nan
    curve[9] = torch.nan
    others = torch.ones(80, dtype=torch.bool, device=device)
    others[[7, 9]] = False

    found = levels_of(curve, c, torch.ones(1, device=device), 0.03)

    assert (found[~others] == LEVELS - 1).all()
    assert (found[others] < LEVELS - 1).sum() > 50
