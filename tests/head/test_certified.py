"""The certified backward in plain torch: within its budget, and the same choice as the kernels'."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import BF16_ROUNDING

from grpo_fast import linear_logprob


def run(call, tolerance: float):
    """Gradients of Σ ±log p, and the certificate."""
    signs = 1 - 2 * (torch.arange(call.targets.numel()) % 2).to(call.hidden.dtype)
    out = linear_logprob(call.hidden, call.weight, call.targets, **call.options, tolerance=tolerance)
    return torch.autograd.grad((out.logprob * signs).sum(), call.parameters), out.certificate


@pytest.mark.parametrize(("transformed", "tolerance"), [(False, 1.0), (True, 1.0), (True, 20.0)])
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
    assert (hidden - exact).norm(dim=1).norm() <= allowed


def test_chunks_of_rows_and_columns_change_no_choice(make_call, monkeypatch):
    call = make_call((40,), 1500, 32, spread=8.0, transformed=True, dtype=torch.float64)
    whole, certificate = run(call, 5.0)
    monkeypatch.setattr("grpo_fast.head.plan._CHUNK_ROWS", 7)
    monkeypatch.setattr("grpo_fast.head.plan._CPU_CHUNK_BYTES", 7 * 8 * 300)
    chunked, same = run(call, 5.0)

    assert torch.equal(certificate.values, same.values)
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("transformed", [False, True])
def test_it_chooses_what_the_kernels_choose(make_call, device, request, transformed):
    if device.type == "cuda":
        pytest.skip("holds the interpreter's choice against the CPU's")
    call = make_call((24,), 1200, 32, spread=8.0, transformed=transformed)
    call = replace(call, softcap=60.0 if transformed else None)
    expected, wanted = run(call, 1.0)
    request.getfixturevalue("hopper")

    found, got = run(call, 1.0)

    # Which side of a threshold an entry falls on is for the last bits to say: a few fall on the other.
    for a, b in zip(found[:2], expected, strict=False):
        assert (a - b).norm() <= 3e-4 * b.norm()
    torch.testing.assert_close(got.values, wanted.values, rtol=0.02, atol=1e-6)
