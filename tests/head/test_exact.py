"""Exact gradients from stored exponentials: kept for the backward, or of a frozen head's rows in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_fast.head import plan

DIFFERENTIABLE = ("logprob", "entropy", "logsumexp", "mean_logit")


@pytest.fixture
def small_chunks(monkeypatch):
    """Split products into several chunks of rows and columns."""
    exponentials = pytest.importorskip("grpo_fast.kernels.exponentials")
    monkeypatch.setattr(exponentials, "_PRODUCT_BYTES", 1)
    monkeypatch.setattr(exponentials, "_WIDTH", 32)
    monkeypatch.setattr(exponentials, "_RUN", 16)
    monkeypatch.setattr(plan, "_JACOBIAN_BYTES", 1)


@pytest.fixture
def make_hard(make_call, hopper, rng):
    """Make calls with few frequent targets, some hundreds of nats deep, and upstream gradients with zeros."""

    def make(dtype: torch.dtype, rows: int = 90):
        call = make_call((rows,), 300, 40, dtype=dtype, spread=6.0, bias=True)
        targets = torch.where(call.targets < 0, call.targets, call.targets % 3 * 97)
        upstream = 1e-4 * torch.randn(rows, generator=rng)
        upstream[::5] = 0
        with torch.no_grad():
            call.hidden[1::9] *= 20
        temperature = torch.rand(rows, generator=rng) + 0.5
        call = replace(call, targets=targets, temperature=temperature, logit_scale=1.25)
        return hopper(call), hopper(upstream)

    return make


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("frozen", [False, True], ids=["kept", "frozen"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 2.6e-3), (torch.float16, 8e-4)]
)
@pytest.mark.drawn(3)
def test_stored_exponentials_err_no_more_than_a_rounded_logit_gradient(
    make_hard, oracle, dtype, limit, frozen
):
    call, upstream = make_hard(dtype)
    exact = oracle.exact_gradients(call, {"logprob": upstream})
    with torch.no_grad():
        call.hidden[(call.targets == -100) | (upstream == 0)] = torch.nan
    parameters = call.parameters[: 1 if frozen else 3]
    for parameter in call.parameters[1:]:
        parameter.requires_grad_(not frozen)

    logprob = call.outputs(tolerance=0.0, recompute=frozen)["logprob"]
    found, again = (torch.autograd.grad(logprob, parameters, upstream, retain_graph=True) for _ in range(2))

    assert all(map(torch.equal, found, again))
    for got, expected in zip(found, exact, strict=False):
        few = got.dim() == 1  # large entries, whose own rounding counts
        assert oracle.relative(got, expected) < limit * (1 + few)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("names", [("logprob", "logsumexp"), DIFFERENTIABLE])
def test_other_statistics_may_be_differentiated_too(hopper, make_call, make_upstream, oracle, names):
    call = make_call((30,), 300, 40)
    call = hopper(replace(call, targets=call.targets.abs() % 7))  # no row is ignored
    upstream = {name: hopper(gradient) for name, gradient in make_upstream((30,), names).items()}

    found = oracle.gradients(call, call.outputs(names, recompute=False), upstream)

    for got, expected in zip(found, oracle.exact_gradients(call, upstream), strict=True):
        assert oracle.relative(got, expected) < 1e-5
