"""The sampled backward, of the oracle and of the kernels: unbiased, as certified, the same choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast import linear_logprob
from tests.head import selection


def run(call, tolerance: float, upstream: torch.Tensor | None = None, outputs=("logprob",), **options):
    """Gradients of Σ ±log p, and the certificate."""
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
def test_a_row_that_is_not_finite_harms_no_other_and_the_certificate_is_nan(on_path, make_call, value):
    call = on_path(make_call((24,), 1200, 32, spread=8.0))
    upstream = on_path(torch.ones(24))
    upstream[4] = value

    (hidden, *_), certificate = run(call, 2.0, upstream)
    exact, _ = run(call, 0.0, torch.where(upstream == 1, upstream, 0))

    others = torch.arange(24, device=hidden.device) != 4
    assert not hidden[4].isfinite().all()
    assert certificate.hidden_error.isnan() and certificate.weight_error.isnan()
    assert (hidden - exact[0])[others].norm() <= 0.05 * exact[0][others].norm()


@pytest.mark.parametrize("differs", ["seed", "upstream"])
def test_equal_batches_draw_alike_unless_seed_or_upstream_differ(make_call, differs):
    call, draws = make_call((24,), 1200, 32, spread=8.0), 32
    exact, _ = run(call, 0.0)

    def error(number: int) -> torch.Tensor:
        """Of the gradients, (-1,), relative to the upstream gradient's size."""
        scale = 2.0**number if differs == "upstream" else 1.0
        upstream = scale * (1 - 2 * (torch.arange(24) % 2).to(call.hidden))
        found, _ = run(call, 16.0, upstream, seed=number if differs == "seed" else None)
        pairs = zip(found[:2], exact, strict=False)
        return torch.cat([(a / scale - b).flatten() for a, b in pairs])

    errors = torch.stack([error(number) for number in range(draws)])

    assert torch.equal(error(3), errors[3])
    # One is expected of independent draws; those that err alike have as many as there are.
    assert draws * errors.mean(0).square().sum() / errors.square().sum(1).mean() < 16


@pytest.mark.parametrize(("vocabulary", "depth", "spread"), [(6000, 64, 4.0), (20_000, 32, 3.0)])
def test_the_error_of_pairs_and_entries_together_is_within_the_tolerance(
    make_call, vocabulary, depth, spread
):
    call = make_call((48,), vocabulary, depth, spread=spread)
    for tolerance in (0.5, 2.0, 16.0):
        _, certificate = run(call, tolerance)

        assert 0.5 * tolerance < certificate.weight_error < certificate.hidden_error <= tolerance


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
