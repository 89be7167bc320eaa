"""One budget, a threshold for every row."""

from __future__ import annotations

import pytest
import torch
from grpo_fast.kernels import LEVELS
from grpo_fast.kernels.balance import balance, log_levels


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


def test_fewer_masses_are_kept_than_with_one_threshold_for_all_rows(rng, device):
    levels = log_levels(device)
    masses, weight = mixed_masses(rng).to(device), torch.logspace(-2, 2, 300, device=device)

    got = balance(curves(masses, levels), levels, weight, torch.tensor(1.0, device=device))

    kept = (masses >= got.log_threshold.exp()[:, None]).sum()
    uniform = next(level for level in levels if (weight * curves(masses, level[None])).square().sum() <= 1)
    assert kept < 0.9 * (masses >= uniform.exp()).sum()


def test_no_budget_leaves_out_nothing_and_a_curve_above_the_budget_is_unmet_and_adds_nothing(rng, device):
    levels, ones = log_levels(device), torch.ones(300, device=device)

    none = balance(curves(mixed_masses(rng).to(device), levels), levels, ones, torch.zeros((), device=device))
    curve = torch.full((LEVELS, 300), 0.1, device=device)
    above = balance(curve, levels, ones, torch.tensor(1e-4, device=device))

    assert (none.left_out == 0).all() and none.unmet.item() == 0
    assert above.unmet.item() == 1 and (above.log_threshold == -torch.inf).all()


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


def test_rows_of_no_weight_cost_nothing(device):
    levels = log_levels(device)
    curve = torch.rand(LEVELS, 4, device=device).sort(0, descending=True).values

    got = balance(curve, levels, torch.zeros(4, device=device), torch.tensor(1e-9, device=device))

    assert (got.log_threshold == levels[0]).all()
