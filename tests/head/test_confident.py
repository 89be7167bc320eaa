"""Rows that are sure of their target: what is left to say of them keeps its digits on every path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

MARGINS = torch.arange(1, 81)  # nats from the log-sum-exp of all others to the target's logit


@dataclass(frozen=True)
class Sure:
    """What float64 makes of the call's rows; a log-probability of 1e-35 is none of its differences."""

    call: object
    logprob: Tensor
    entropy: Tensor
    jacobian: Tensor  # (N, H) dlogprob/dhidden


@pytest.fixture(params=[0, 30], ids=["logits near 1", "logits near 30"])
def make_sure(request, rng, oracle, on_path):
    """Makes calls whose products float32 holds exactly, a margin a row, for the path of the test."""

    def make(dtype: torch.dtype = torch.float32) -> Sure:
        rows, words = len(MARGINS), 300
        small = lambda *shape: torch.randint(-8, 9, shape, generator=rng) / 8.0  # noqa: E731
        targets = torch.randperm(words, generator=rng)[:rows]
        own = torch.zeros(words, rows).index_put_((targets, torch.arange(rows)), torch.tensor(1.0))
        weight = torch.cat([small(words, 7), torch.ones(words, 1), own], 1)
        level = torch.full((rows, 1), float(request.param))
        hidden = torch.cat([small(rows, 7), level, torch.zeros(rows, rows)], 1)
        logits = (hidden @ weight.T).double()
        others = logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
        height = MARGINS + others - logits.gather(1, targets[:, None])[:, 0]
        hidden[torch.arange(rows), 8 + torch.arange(rows)] = (height * 2).round().float() / 2
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
def test_each_rows_gradient_is_as_accurate_as_that_of_an_unsure_one(make_sure, dtype, limit, how):
    """Two roundings to the dtype at most, the coefficient's and the result's."""
    sure = make_sure(dtype)
    sure.call.weight.requires_grad_(how != "frozen")
    logprob = sure.call.outputs(tolerance=0.0, recompute=how != "kept")["logprob"]

    (found,) = torch.autograd.grad(logprob.sum(), sure.call.hidden)

    within = slice(0, 70)  # beyond, single probabilities are no normal numbers of float32
    error = (found - sure.jacobian).norm(dim=1) / sure.jacobian.norm(dim=1)
    assert error[within].max() < limit
