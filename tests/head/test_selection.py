"""The sampled backward of the oracle and of the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast import linear_logprob
from tests.head import selection


def run(call, tolerance: float, upstream: torch.Tensor | None = None, outputs=("logprob",), **options):
    """Return gradients of Σ ±log p, and the certificate."""
    signs = 1 - 2 * (torch.arange(call.targets.numel()) % 2).to(call.hidden.dtype)
    signs = signs if upstream is None else upstream
    options |= call.options | {"tolerance": tolerance, "outputs": outputs}
    out = linear_logprob(call.hidden, call.weight, call.targets, **options)
    loss = (out.logprob * signs).sum()
    if out.entropy is not None:
        loss = loss + 0.01 * out.entropy.sum()
    return torch.autograd.grad(loss, call.parameters), out.certificate


@pytest.fixture(autouse=True)
def sampling_without_kernels():
    with selection.sampling_without_kernels():
        yield


@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
@pytest.mark.drawn(3)
def test_gradients_of_any_size_keep_their_relative_accuracy(on_path, make_call, oracle, magnitude):
    call = on_path(make_call((24,), 1200, 32, spread=8.0))
    upstream = on_path(torch.ones(24))

    found, certificate = run(call, 2.0, magnitude * upstream)
    alike, same = run(call, 2.0, upstream)
    exact, _ = run(call, 0.0, upstream)

    torch.testing.assert_close(certificate.values[2], same.values[2], rtol=0.02, atol=0)
    for a, b, expected in zip(found[:2], alike, exact, strict=False):
        assert a.any()
        drawn = oracle.relative(b, expected)
        assert oracle.relative(a.double() / magnitude, expected) < 2 * drawn + 1e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.drawn(3)
def test_a_row_that_is_not_finite_changes_no_other_but_the_certificate(on_path, make_call, value):
    call = on_path(make_call((24,), 1200, 32, spread=8.0))
    upstream = on_path(torch.ones(24))
    upstream[4] = value

    (hidden, *_), certificate = run(call, 2.0, upstream)
    exact, _ = run(call, 0.0, torch.where(upstream == 1, upstream, 0))

    others = torch.arange(24, device=hidden.device) != 4
    assert not hidden[4].isfinite().all()
    assert certificate.hidden_error.isnan() and certificate.weight_error.isnan()
    assert (hidden - exact[0])[others].norm() <= 0.05 * exact[0][others].norm()


@pytest.mark.parametrize("transformed", [False, True])
def test_it_chooses_what_the_kernels_choose(make_call, device, request, transformed):
    if device.type == "cuda":
        pytest.skip("holds the interpreter's choice against the CPU's")
    call = make_call((24,), 1200, 32, spread=8.0, transformed=transformed)
    call = replace(call, softcap=60.0 if transformed else None)
    _, wanted = run(call, 1.0)
    request.getfixturevalue("hopper")

    _, got = run(call, 1.0)

    # A log-sum-exp that differs in its last bit draws anew: what is drawn with is the same.
    torch.testing.assert_close(got.values[:3], wanted.values[:3], rtol=0.03, atol=0.02)
