"""The sparse backward against float64: exact, or unbiased."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING, SparseConfig, sparse_rows
from grpo_fast.kernels.coefficients import RowCoefficients, row_coefficients
from grpo_fast.kernels.select import ActivePairs, select_live
from grpo_fast.kernels.sparse import sparse_backward

from grpo_fast.head.call import HeadGradients, Wanted

# Small blocks and many entries at a time: the interpreter pays per program and per step.
QUICK = SparseConfig(pair_rows=32, pair_depth=32, row_entries=64, weight_depth=32, weight_columns=64)


class Ran(NamedTuple):
    rows: RowCoefficients
    live: ActivePairs
    got: HeadGradients
    certificate: torch.Tensor


def run(
    head, tolerance: float = 0.0, *, config: SparseConfig = QUICK, capacity: int | None = None, **wanted
) -> Ran:
    wanted = Wanted(**{"hidden": True, "weight": True, "bias": False} | wanted)
    rows = row_coefficients(head.call, *head.upstream)
    live = select_live(head.call, rows, head.tile_lse, tolerance=tolerance)
    capacity = 2 * head.tile_lse.numel() if capacity is None else capacity
    certificate = torch.empty(4, device=rows.mass.device)
    got = sparse_backward(head.call, live, wanted, certificate, capacity=capacity, config=config)
    return Ran(rows, live, HeadGradients(*got), certificate)


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def straightforward(head) -> dict[str, float]:
    """Return errors of a dense backward that rounds the logit gradient and the results."""
    dtype = head.hidden.dtype
    gradient = head.logit_gradient.to(dtype).double()
    d_hidden = (gradient @ head.weight.double()).to(dtype)
    d_weight = (gradient.T @ head.hidden.double()).to(dtype)
    return {"hidden": relative(d_hidden, head.d_hidden), "weight": relative(d_weight, head.d_weight)}


@pytest.mark.parametrize(
    ("vocabulary", "depth", "transformed", "dtype"),
    [
        (1, 1, False, None),
        (127, 33, True, None),
        (129, 64, False, torch.float32),
        (256, 65, False, None),
        (250, 48, True, torch.float32),
        (300, 48, True, torch.bfloat16),
    ],
)
@pytest.mark.drawn(3)
def test_tolerance_zero_is_the_dense_gradient_at_every_edge(
    make_head, rng, vocabulary, depth, transformed, dtype
):
    peak = 8.0 if transformed else 1.0
    head = make_head(15, vocabulary, depth, peak=peak, transformed=transformed, g_logsumexp=not transformed)
    exact = {"weight": head.d_weight} | ({"bias": head.d_bias} if transformed else {})
    into = None
    if dtype is not None:
        into = torch.randn(head.weight.shape, generator=rng).to(head.weight.device, dtype)
        exact["weight"] = into.double() + head.d_weight
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-6
    idle = ~head.gradient.live()
    hidden = head.hidden.masked_fill(idle[:, None], torch.nan)

    ran = run(replace(head, hidden=hidden), bias=transformed, into_weight=into)

    got = ran.got
    assert ran.certificate.tolist() == [pytest.approx(ran.live.count.sum() / head.tile_lse.numel()), 0, 0, 1]
    assert (got.hidden[idle] == 0).all()
    torch.testing.assert_close(got.hidden.double(), head.d_hidden, rtol=1e-4, atol=1e-6)
    assert dtype is None or got.weight is into
    for name, expected in exact.items():
        error = (getattr(got, name).double() - expected).norm()
        assert error <= limit * expected.norm() + 1e-6


SHAPES = [
    {"peak": 60.0, "spread": 1.0},
    {"peak": 8.0, "spread": 1.0, "transformed": True},
    {"peak": 20.0, "g_entropy": 0.05},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.drawn(1)
def test_the_mean_over_batches_is_exact_and_the_error_is_as_certified(make_head, shape):
    head = make_head(7, 900, 8, **shape)
    draws = 18
    found, certificate = {"hidden": [], "weight": []}, None
    for draw in range(draws):  # another row, which weighs nothing, salts the draws anew
        head.logsumexp[3], head.targets[3] = float(draw), 0
        for upstream in filter(lambda g: g is not None, (head.g, head.g_entropy)):
            upstream[3] = 0
        ran = run(head, 24.0)
        certificate = ran.certificate
        for name, errors in found.items():
            exact = getattr(head, f"d_{name}")
            errors.append((getattr(ran.got, name).double() - exact).flatten())

    for name, errors in found.items():
        error = torch.stack(errors)
        square = error.square().sum(1).mean()
        assert square > 0
        # One is expected; what is left out on one side alone would make it as many as there are draws.
        assert draws * error.mean(0).square().sum() / square < 7.5, name
    assert 0 < certificate[2] <= certificate[1] <= 24 * (1 + 1e-4)
    norm = ran.rows.squares.sum().sqrt() * BF16_ROUNDING * head.weight.double().norm(dim=1).max()
    hidden = torch.stack(found["hidden"]).square().sum(1).mean().sqrt()
    assert 0.1 * certificate[1] * norm <= hidden <= 1.3 * certificate[1] * norm


@pytest.mark.parametrize(  # at zero: by rounding the result alone
    ("dtype", "magnitude", "tolerance"),
    [
        *((torch.bfloat16, 1.0, 0.0), (torch.bfloat16, 1.0, 2.0)),
        *((torch.float16, 2.0**-20, 0.0), (torch.float16, 2.0**-20, 2.0), (torch.float16, 2.0**20, 2.0)),
        *((torch.bfloat16, 1e-25, 2.0), (torch.bfloat16, 1e25, 2.0)),
    ],
)
@pytest.mark.drawn(4)
def test_half_precision_errs_as_dense_in_that_dtype_plus_the_tolerance(
    make_head, dtype, magnitude, tolerance
):
    original = make_head(24, 700, dtype=dtype, peak=30.0)
    head = replace(
        original, g=original.g * magnitude, logit_gradient=original.logit_gradient * magnitude,
        d_hidden=original.d_hidden * magnitude, d_weight=original.d_weight * magnitude,
    )  # fmt: skip
    scaled = head if dtype == torch.bfloat16 else original  # float16 would need a scaled loss
    dense = straightforward(scaled)

    ran = run(head, tolerance, into_weight=torch.zeros_like(head.weight, dtype=torch.float32))

    got, certificate = ran.got, ran.certificate
    norm = ran.rows.squares.sum().sqrt() * BF16_ROUNDING
    rounded = relative(head.d_hidden.to(dtype), head.d_hidden)
    drawn = 2 * certificate[1] * norm * head.weight.double().norm(dim=1).max() / head.d_hidden.norm()
    assert relative(got.hidden, head.d_hidden) <= 1.05 * rounded + drawn + 5e-5
    drawn = 2 * certificate[2] * norm * head.hidden.double().norm(dim=1).max() / head.d_weight.norm()
    assert relative(got.weight, head.d_weight) <= 1.2 * dense["weight"] + drawn + 5e-5


def test_the_target_of_a_nearly_certain_row_keeps_its_gradient(make_head):
    head = make_head(20, 300, peak=0.0)
    logprob = torch.full_like(head.logprob, -1e-7)

    *_, got, _ = run(
        replace(head, logprob=logprob, logsumexp=head.logsumexp + 60, tile_lse=head.tile_lse - 60)
    )

    working = (head.targets >= 0) & (head.g != 0)
    expected = 1e-7 * head.g[working, None].double() * head.weight[head.targets[working]].double()
    assert relative(got.hidden[working], expected) < 1e-5


def test_neither_room_nor_another_run_nor_long_rows_first_change_a_bit(make_head, monkeypatch):
    head = make_head(10, 300, 32, peak=20.0, dtype=torch.bfloat16)
    whole = run(head, 1.0)

    for long, capacity in (256, None), (256, int(whole.live.row_ends[-1])), (8, None), (-1, None):
        monkeypatch.setattr(sparse_rows, "_LONG", long)
        ran = run(head, 1.0, capacity=capacity)

        assert torch.equal(ran.got.hidden, whole.got.hidden)
        assert torch.equal(ran.got.weight, whole.got.weight)
        assert torch.equal(ran.certificate, whole.certificate)


@pytest.mark.parametrize(("limit", "value"), [("_SCAN", 128), ("SEGMENT", 2)])
def test_rows_longer_than_a_scan_or_a_segment_keep_what_others_keep(make_head, monkeypatch, limit, value):
    head = make_head(6, 700, peak=20.0)
    tolerance = 0.0 if limit == "SEGMENT" else 1.0
    whole = run(head, tolerance)
    monkeypatch.setattr(sparse_rows, limit, value)

    parts = run(head, tolerance)

    assert parts.live.count.max() > 4
    torch.testing.assert_close(parts.certificate, whole.certificate)
    torch.testing.assert_close(parts.got.hidden, whole.got.hidden, rtol=1e-4, atol=1e-5)


def test_pairs_that_do_not_fit_leave_existing_gradients_alone(make_head):
    head = make_head(12, 300, transformed=True)
    weight = torch.ones_like(head.weight)
    room = int(run(head).live.row_ends[-1]) - 1

    run(head, capacity=room, bias=True, into_weight=weight)

    assert (weight == 1).all()
