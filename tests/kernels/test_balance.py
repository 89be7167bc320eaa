"""One budget, a threshold for every row."""

from __future__ import annotations

import pytest
import torch
from grpo_fast.kernels.balance import balance, log_levels

from grpo_fast.head import certified


def curves(masses: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """(LEVELS, N) from (N, K) masses."""
    return torch.stack([(masses * (masses < level.exp())).sum(1) for level in levels])


def mixed_masses(rng: torch.Generator, rows: int = 300) -> torch.Tensor:
    """Rows from peaked to flat, (N, 400) float32."""
    spread = 1 + 7 * torch.rand(rows, 1, generator=rng)
    return (spread * torch.randn(rows, 400, generator=rng)).softmax(1)


@pytest.mark.parametrize("budget", [1e-6, 1e-3, 0.3])
def test_what_is_left_out_is_on_the_curve_and_within_the_budget(rng, device, budget):
    levels = log_levels(device)
    masses, weight = mixed_masses(rng).to(device), torch.randn(300, generator=rng).to(device)

    got = balance(curves(masses, levels), levels, weight, torch.tensor(budget, device=device))

    left_out = (masses * (masses < got.log_threshold.exp()[:, None])).sum(1)
    torch.testing.assert_close(got.left_out, left_out)
    assert (weight * left_out).square().sum() <= budget * 1.0001
    assert (weight * left_out).square().sum() >= budget * 0.1
    assert got.unmet.item() == 0


@pytest.mark.parametrize("budget", [0.0, 1e-4, 1.0])
def test_a_rows_threshold_is_that_of_the_torch_path(rng, device, budget):
    levels = log_levels(device)
    masses, weight = mixed_masses(rng).to(device), torch.logspace(-2, 2, 300, device=device)
    weight[::9] = 0
    curve, allowed = curves(masses, levels), torch.tensor(budget, device=device)

    for already in (0.0, 0.1):  # left out in any case, and too much
        got = balance(curve + already, levels, weight, allowed)
        expected = certified.balance(curve + already, levels.exp(), weight, allowed.sqrt())

        assert bool(got.unmet) == expected.unmet == bool(already)
        same = got.log_threshold.exp() == expected.threshold
        assert same.float().mean() > 0.98  # the others lie on the border, which rounding moves
        torch.testing.assert_close(got.left_out[same], expected.left_out[same])


def test_a_row_of_nan_leaves_out_nothing_and_does_not_spoil_the_others(rng, device):
    levels = log_levels(device)
    curve, weight = curves(mixed_masses(rng).to(device), levels), torch.ones(300, device=device)
    weight[7] = torch.nan
    curve[:, 9] = torch.nan
    others = torch.ones(300, dtype=torch.bool, device=device)
    others[[7, 9]] = False

    got = balance(curve, levels, weight, torch.tensor(1e-3, device=device))

    assert (got.log_threshold[~others] == -torch.inf).all()
    assert got.left_out[others].count_nonzero() > 200
    assert got.unmet.item() == 0
