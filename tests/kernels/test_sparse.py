"""The sparse backward against the dense one in float64: exact or certified."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import sparse, sparse_rows
from grpo_fast.kernels.select import select_pairs
from grpo_fast.kernels.sparse import sparse_backward
from grpo_fast.kernels.sparse_config import SparseConfig

from grpo_fast.head.problem import Wanted
from grpo_fast.head.tuning import sizes_for

# Small blocks and many entries at a time: the interpreter pays per program and per step.
QUICK = SparseConfig(pair_rows=32, pair_depth=32, row_entries=64, weight_depth=32, weight_columns=64)


def run(head, tolerance: float = 0.0, *, config: SparseConfig = QUICK, **wanted):
    wanted = Wanted(**{"hidden": True, "weight": True, "bias": False} | wanted)
    pairs = select_pairs(
        head.problem, head.gradient, head.tile_lse, head.logprob, tolerance=tolerance, config=config
    )
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
    ("transformed", "g_logsumexp"),
    [(False, True), (True, False)],
    ids=["plain, logprob and logsumexp", "bias, temperature, scale, softcap"],
)
def test_tolerance_zero_is_the_dense_gradient(make_head, transformed, g_logsumexp):
    head = make_head(40, 300, transformed=transformed, g_logsumexp=g_logsumexp)

    pairs, got = run(head, bias=transformed)

    assert pairs.metrics(got.left_out)["error_bound"] == 0
    assert got.dense.tolist() == [0, 0]
    assert relative(got.hidden, head.d_hidden) < 1e-6
    assert relative(got.weight, head.d_weight) < 1e-6
    if transformed:
        assert relative(got.bias, head.d_bias) < 1e-6


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [({"peak": 60.0, "spread": 1.0}, 1.0), ({"peak": 30.0}, 50.0), ({"peak": 0.0}, 1.0)],
)
def test_the_certificate_bounds_the_error_of_every_row(make_head, shape, tolerance):
    head = make_head(50, 900, transformed=tolerance > 1, **shape)

    pairs, got = run(head, tolerance)

    slope = 1.0 if head.inv_temperature is None else head.inv_temperature * head.logit_scale
    bound = row_bound(pairs, got.left_out) * slope * head.weight.norm(dim=1).max()
    error = (got.hidden.double() - head.d_hidden).norm(dim=1)
    assert (error <= bound + 1e-6 * head.d_hidden.norm(dim=1)).all()
    within = pairs.metrics(got.left_out)["error_bound"] <= tolerance * (1 + 1e-4)
    assert within == (got.dense[1] == 0)
    assert (error > 1e-5 * head.d_hidden.norm(dim=1)).any()  # something was left out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6])
def test_half_precision_errs_no_more_than_dense_in_that_dtype_plus_the_tolerance(make_head, dtype, magnitude):
    head = make_head(50, 900, dtype=dtype, peak=30.0)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_into_existing_ones_in_place(make_head, rng, dtype):
    head = make_head(40, 300, transformed=True)
    weight = torch.randn(head.weight.shape, generator=rng).to(head.weight.device, dtype)
    bias = torch.randn(300, generator=rng).to(head.weight.device, dtype)
    expected = weight.double() + head.d_weight, bias.double() + head.d_bias

    _, got = run(head, bias=True, into_weight=weight, into_bias=bias)

    assert got.weight is weight and got.bias is bias
    assert relative(weight, expected[0]) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert relative(bias, expected[1]) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(("vocabulary", "depth"), [(1, 1), (127, 33), (129, 64), (256, 65)])
def test_vocabularies_and_hidden_sizes_around_every_edge(make_head, vocabulary, depth):
    head = make_head(12, vocabulary, depth, peak=1.0)

    _, got = run(head)

    torch.testing.assert_close(got.hidden.double(), head.d_hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.weight.double(), head.d_weight, rtol=1e-4, atol=1e-6)


def test_strided_rows_and_the_shipped_float32_configuration(make_head):
    head = make_head(30, 300, 48)
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


def test_chunks_and_runs_change_no_bit(make_head):
    head = make_head(40, 600, peak=20.0, dtype=torch.bfloat16)
    chunked = replace(QUICK, chunk_bytes=128 * 128 * 2)

    results = [run(head, 1.0, config=config) for config in (QUICK, QUICK, chunked)]

    assert results[2][0].chunk_tiles.numel() > 3
    for name in ("hidden", "weight"):
        first, again, in_chunks = (getattr(got, name) for _, got in results)
        assert torch.equal(first, again)
        assert torch.equal(first, in_chunks)


@pytest.mark.parametrize("depth", [40, 520])
def test_splitting_a_row_over_programs_changes_its_gradient_by_rounding_alone(make_head, monkeypatch, depth):
    head = make_head(12, 300, depth, peak=30.0, spread=1.0)
    _, whole = run(head, 1.0)
    monkeypatch.setattr(sparse_rows, "LONG_ROW", 8)

    _, split = run(head, 1.0)
    monkeypatch.setattr(sparse_rows, "LONG_ROW", -1)
    _, every = run(head, 1.0)

    for got in (split, every):
        torch.testing.assert_close(
            got.hidden, whole.hidden, rtol=1e-5, atol=1e-6 * float(whole.hidden.abs().max())
        )
        assert torch.equal(got.left_out, whole.left_out)


def test_the_lists_of_entries_serve_more_than_once(make_head, monkeypatch):
    form, formed = sparse.hidden_gradient, []

    def twice(*arguments):
        formed.extend(form(*arguments)[0] for _ in range(2))
        return form(*arguments)

    monkeypatch.setattr(sparse, "hidden_gradient", twice)

    _, got = run(make_head(20, 300, peak=20.0), 1.0)

    assert torch.equal(formed[0], got.hidden) and torch.equal(formed[1], got.hidden)


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


def test_rows_without_gradient_get_exact_zeros_whatever_they_hold(make_head):
    head = make_head(40, 300)
    idle = (head.targets < 0) | (head.g == 0)
    hidden = head.hidden.masked_fill(idle[:, None], torch.nan)

    _, got = run(replace(head, hidden=hidden))

    assert (got.hidden[idle] == 0).all()
    assert relative(got.weight, head.d_weight) < 1e-6


def test_unequal_dtypes_and_strided_columns_are_refused_by_name(make_head):
    head = make_head(20, 200)

    with pytest.raises(ValueError, match=r"hidden is torch.float32 and weight is torch.bfloat16"):
        run(replace(head, weight=head.weight.bfloat16()))
    with pytest.raises(ValueError, match=r"weight has stride .* pass weight.contiguous\(\)"):
        run(replace(head, weight=head.weight.T.contiguous().T))
