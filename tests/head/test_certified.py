"""The certified backward in plain torch: within its budget, and the same choice as the kernels'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING

from grpo_fast import linear_logprob


def run(call, tolerance: float | None):
    """Gradients of Σ ±log p, and the certificate."""
    signs = 1 - 2 * (torch.arange(call.targets.numel()) % 2).to(call.hidden.dtype)
    out = linear_logprob(call.hidden, call.weight, call.targets, **call.options, tolerance=tolerance)
    found = torch.autograd.grad((out.logprob * signs).sum(), call.parameters)
    return found, out.certificate


def row_errors(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (got.double() - exact.double()).norm(dim=1)


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("tolerance", [1.0, 20.0])
def test_something_is_left_out_and_the_certificate_bounds_it(make_call, transformed, tolerance):
    call = make_call((40,), 1500, 32, spread=8.0, transformed=transformed, dtype=torch.float64)
    call = replace(call, softcap=60.0 if transformed else None)

    (exact, *_), full = run(call, 0.0)
    (hidden, *_), certificate = run(call, tolerance)

    slope = call.logit_scale / torch.as_tensor(call.temperature).min()
    steepest = (slope * call.weight.norm(dim=1).max()).item()
    working = (call.targets != -100).sum()
    allowed = certificate.error_bound * BF16_ROUNDING * 2 * working.sqrt() * steepest
    assert full.density == 1 and full.error_bound == 0
    assert 0 < certificate.density < 1
    assert 0 < certificate.error_bound <= tolerance
    assert row_errors(hidden, exact).norm() <= allowed


@pytest.mark.parametrize("transformed", [False, True])
def test_it_chooses_what_the_kernels_choose(make_call, device, request, transformed):
    if device.type == "cuda":
        pytest.skip("holds the interpreter's choice against the CPU's")
    call = replace(
        make_call((40,), 1500, 32, spread=8.0, transformed=transformed), softcap=60.0 if transformed else None
    )
    expected, wanted = run(call, 1.0)
    request.getfixturevalue("hopper")

    found, got = run(call, 1.0)

    # Which side of a threshold an entry falls on is for the last bits to say: a few fall on the other.
    assert (found[0] - expected[0]).norm() <= 3e-4 * expected[0].norm()
    assert (found[1] - expected[1]).norm() <= 3e-4 * expected[1].norm()
    torch.testing.assert_close(got.values, wanted.values, rtol=0.02, atol=1e-6)


def test_no_tolerance_means_exact_where_no_kernel_runs(make_call):
    call = make_call((12,), 600, 16, spread=8.0)

    found, certificate = run(call, None)

    assert certificate.density == 1
    for a, b in zip(found, run(call, 0.0)[0], strict=True):
        assert torch.equal(a, b)
