"""Rows with a target probability near 1 keep their digits on every path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.head.conftest import sure_rows


@dataclass(frozen=True)
class Sure:
    """A call and its float64 results, without differences: a log-probability may be 1e-35."""

    call: object
    logprob: Tensor
    entropy: Tensor
    jacobian: Tensor  # (N, H) dlogprob/dhidden


@pytest.fixture(params=[0, 30], ids=["logits near 1", "logits near 30"])
def make_sure(request, rng, oracle, on_path):

    def make(dtype: torch.dtype = torch.float32) -> Sure:
        hidden, weight, targets = sure_rows(rng, float(request.param))
        return expected(oracle.Call(hidden.to(dtype), weight.to(dtype), targets))

    def expected(call) -> Sure:
        target, weight = call.targets[:, None], call.weight.double()
        logits = call.hidden.double() @ weight.T
        others = logits.scatter(1, target, -torch.inf)
        logprob = -(others.logsumexp(1) - logits.gather(1, target)[:, 0]).exp().log1p()
        log_p = others - logits.logsumexp(1, keepdim=True)
        p = log_p.exp()
        entropy = -logprob.exp() * logprob - torch.where(p > 0, p * log_p, 0).sum(1)
        jacobian = -logprob.expm1()[:, None] * weight[call.targets] - p @ weight
        call.hidden.requires_grad_(), call.weight.requires_grad_()
        return Sure(on_path(call), *map(on_path, (logprob, entropy, jacobian)))

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probability_and_entropy_keep_digits_to_the_smallest_numbers(make_sure, dtype):
    sure = make_sure(dtype)

    found = sure.call.outputs(("logprob", "entropy", "argmax_is_target"))

    assert sure.logprob[-1] > -1e-34
    torch.testing.assert_close(found["logprob"].double(), sure.logprob, rtol=5e-6, atol=0)
    torch.testing.assert_close(found["entropy"].double(), sure.entropy, rtol=3e-5, atol=0)
    assert found["argmax_is_target"].all()


@pytest.mark.parametrize("how", ["recomputed", "kept", "frozen"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 3e-5), (torch.bfloat16, 2**-7)])
def test_each_rows_gradient_is_accurate_relative_to_its_size(make_sure, dtype, limit, how):
    """At most two roundings to the dtype: of the coefficient and of the result."""
    sure = make_sure(dtype)
    sure.call.weight.requires_grad_(how != "frozen")
    logprob = sure.call.outputs(tolerance=0.0, recompute=how != "kept")["logprob"]

    (found,) = torch.autograd.grad(logprob.sum(), sure.call.hidden)

    within = slice(0, 70)  # beyond, single probabilities are no normal numbers of float32
    error = (found - sure.jacobian).norm(dim=1) / sure.jacobian.norm(dim=1)
    assert error[within].max() < limit
