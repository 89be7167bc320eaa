"""The sparse backward against the dense one in float64: exact or certified."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import SparseConfig, sparse, sparse_rows
from grpo_fast.kernels.select import select_pairs
from grpo_fast.kernels.sparse import sparse_backward

from grpo_fast.head.problem import Wanted
from grpo_fast.head.tuning import sizes_for

# Small blocks and many entries at a time: the interpreter pays per program and per step.
QUICK = SparseConfig(pair_rows=32, pair_depth=32, row_entries=64, weight_depth=32, weight_columns=64)


@pytest.fixture(autouse=True)
def long_rows_take_few_steps(monkeypatch):
    monkeypatch.setattr(sparse_rows, "_SLICE_ENTRIES", 128)


def run(head, tolerance: float = 0.0, *, config: SparseConfig = QUICK, **wanted):
    wanted = Wanted(**{"hidden": True, "weight": True, "bias": False} | wanted)
    pairs = select_pairs(head.problem, head.gradient, head.tile_lse, tolerance=tolerance, config=config)
    return pairs, sparse_backward(head.problem, head.logsumexp, pairs, wanted)


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def row_bound(pairs, left_out: torch.Tensor) -> torch.Tensor:
    """(N,) the most by which a row's logit gradient is off, in L1: what its certificate says."""
    return pairs.mass_gradient.abs() * left_out


def straightforward(head) -> dict[str, float]:
    """Errors of a dense backward that rounds the logit gradient and the results to the operands' dtype."""
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
def test_tolerance_zero_is_the_dense_gradient_added_to_existing_ones_at_every_edge(
    make_head, rng, vocabulary, depth, transformed, dtype
):
    peak = 8.0 if transformed else 1.0
    head = make_head(30, vocabulary, depth, peak=peak, transformed=transformed, g_logsumexp=not transformed)
    exact, into = {"weight": head.d_weight} | ({"bias": head.d_bias} if transformed else {}), {}
    if dtype is not None:
        for name, gradient in exact.items():
            before = torch.randn(gradient.shape, generator=rng).to(gradient.device, dtype)
            into[f"into_{name}"], exact[name] = before, before.double() + gradient
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-6
    idle = ~head.gradient.live()
    hidden = head.hidden.masked_fill(idle[:, None], torch.nan)

    pairs, got = run(replace(head, hidden=hidden), bias=transformed, **into)

    assert pairs.metrics(got.left_out)["error_bound"] == 0
    assert got.dense.tolist() == [0, 0]
    assert (got.hidden[idle] == 0).all()
    torch.testing.assert_close(got.hidden.double(), head.d_hidden, rtol=1e-4, atol=1e-6)
    for name, expected in exact.items():
        found = getattr(got, name)
        assert dtype is None or found is into[f"into_{name}"]
        assert (found.double() - expected).norm() <= limit * expected.norm() + 1e-6


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [({"peak": 60.0, "spread": 1.0}, 1.0), ({"peak": 30.0}, 50.0), ({"peak": 0.0}, 1.0)],
)
def test_the_certificate_bounds_the_error_of_every_row(make_head, shape, tolerance):
    head = make_head(40, 700, transformed=tolerance > 1, **shape)

    pairs, got = run(head, tolerance)

    slope = 1.0 if head.inv_temperature is None else head.inv_temperature * head.logit_scale
    bound = row_bound(pairs, got.left_out) * slope * head.weight.norm(dim=1).max()
    error = (got.hidden.double() - head.d_hidden).norm(dim=1)
    assert (error <= bound + 1e-6 * head.d_hidden.norm(dim=1)).all()
    within = pairs.metrics(got.left_out)["error_bound"] <= tolerance * (1 + 1e-4)
    assert within == (got.dense[1] == 0)
    assert (error > 1e-5 * head.d_hidden.norm(dim=1)).any()  # something was left out


@pytest.mark.parametrize(("dtype", "magnitude"), [(torch.bfloat16, 1.0), (torch.float16, 1e-6)])
def test_half_precision_errs_no_more_than_dense_in_that_dtype_plus_the_tolerance(make_head, dtype, magnitude):
    head = make_head(40, 700, dtype=dtype, peak=30.0)
    head = replace(
        head, g=head.g * magnitude, logit_gradient=head.logit_gradient * magnitude,
        d_hidden=head.d_hidden * magnitude, d_weight=head.d_weight * magnitude,
    )  # fmt: skip
    dense = straightforward(replace(head, **({} if dtype == torch.bfloat16 else _unscaled(head, magnitude))))

    pairs, got = run(head, 1.0, into_weight=torch.zeros_like(head.weight, dtype=torch.float32))

    certified = (row_bound(pairs, got.left_out) * head.weight.double().norm(dim=1).max()).norm()
    rounded = relative(head.d_hidden.to(dtype), head.d_hidden)
    assert relative(got.hidden, head.d_hidden) <= rounded + certified / head.d_hidden.norm() + 1e-5
    certified = (row_bound(pairs, pairs.left_out) * head.hidden.double().norm(dim=1)).sum()
    assert relative(got.weight, head.d_weight) <= dense["weight"] + certified / head.d_weight.norm() + 1e-5


def _unscaled(head, magnitude: float) -> dict[str, torch.Tensor]:
    """float16 cannot hold the small gradients; a straightforward implementation would scale the loss."""
    return {name: getattr(head, name) / magnitude for name in ("logit_gradient", "d_hidden", "d_weight")}


def test_the_target_of_a_nearly_certain_row_keeps_its_gradient(make_head):
    head = make_head(20, 300, peak=0.0)
    logprob = torch.full_like(head.logprob, -1e-7)

    _, got = run(replace(head, logprob=logprob, logsumexp=head.logsumexp + 60, tile_lse=head.tile_lse - 60))

    working = (head.targets >= 0) & (head.g != 0)
    expected = 1e-7 * head.g[working, None].double() * head.weight[head.targets[working]].double()
    assert relative(got.hidden[working], expected) < 1e-5


def test_strided_rows_and_the_shipped_float32_configuration(make_head):
    head = make_head(20, 250, 48)
    hidden, weight = (
        torch.full((t.shape[0], 60), torch.nan, device=t.device).index_copy_(
            1, torch.arange(48, device=t.device), t
        )
        for t in (head.hidden, head.weight)
    )

    config = replace(sizes_for((9, 0), torch.float32, 48, True).sparse, row_entries=64)
    _, got = run(replace(head, hidden=hidden[:, :48], weight=weight[:, :48]), config=config)

    assert relative(got.hidden, head.d_hidden) < 1e-6
    assert relative(got.weight, head.d_weight) < 1e-6


def test_chunks_of_pairs_and_runs_change_no_bit(make_head):
    head = make_head(40, 384, peak=20.0, dtype=torch.bfloat16)
    chunked = replace(QUICK, chunk_bytes=60 * 128 * 2)

    results = [run(head, 1.0, config=config) for config in (QUICK, QUICK, chunked)]

    assert results[2][0].chunk_tiles.numel() > 3
    for name in ("hidden", "weight"):
        first, again, in_chunks = (getattr(got, name) for _, got in results)
        assert torch.equal(first, again)
        assert torch.equal(first, in_chunks)


def test_splitting_a_row_over_programs_changes_its_gradient_by_rounding_alone(make_head, monkeypatch):
    head = make_head(8, 250, 40, peak=30.0, spread=1.0)
    monkeypatch.setattr(sparse_rows, "_SLICE", 32)
    form, formed = sparse.hidden_gradient, []

    def twice(*arguments):  # the lists of entries serve more than once
        formed.append(form(*arguments)[0])
        return form(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sparse, "hidden_gradient", twice)
        _, whole = run(head, 1.0)
    assert torch.equal(formed[0], whole.hidden)

    for long in (8, -1):
        monkeypatch.setattr(sparse_rows, "LONG_ROW", long)
        _, got = run(head, 1.0)

        torch.testing.assert_close(
            got.hidden, whole.hidden, rtol=1e-5, atol=1e-6 * float(whole.hidden.abs().max())
        )
        assert torch.equal(got.left_out, whole.left_out)


def test_columns_that_the_bias_rules_out_get_no_gradient(make_head):
    head = make_head(30, 300, transformed=True)
    ruled_out = torch.zeros(300, dtype=torch.bool, device=head.weight.device)
    ruled_out[::5] = True
    ruled_out[head.targets[head.targets >= 0]] = False
    bias = head.bias.masked_fill(ruled_out, -torch.inf)

    _, got = run(replace(head, bias=bias, softcap=None), bias=True)

    assert got.weight[ruled_out].count_nonzero() == 0
    assert got.bias[ruled_out].count_nonzero() == 0
    assert got.hidden.isfinite().all()


def test_pairs_that_overflow_leave_existing_gradients_alone_and_say_so(make_head):
    head = make_head(40, 900, peak=0.0)
    weight = torch.ones_like(head.weight)

    _, got = run(head, into_weight=weight, config=replace(QUICK, pair_density=0.01, least_pairs=0))

    assert got.dense.tolist() == [1, 1]
    assert (weight == 1).all()


def test_entries_that_overflow_spare_the_weight_gradient(make_head):
    head = make_head(40, 300)

    _, got = run(head, config=replace(QUICK, entries_per_row=10, least_entries=0))

    assert got.dense.tolist() == [0, 1]
    assert relative(got.weight, head.d_weight) < 1e-6
