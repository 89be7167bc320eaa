"""Rows of extreme sizes, temperatures and upstream gradients: no NaN, and errors within their bounds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Kind:
    """Differences in the machine code."""

    dtype: torch.dtype
    depth: int
    bias: bool = False
    temperature: bool = False
    softcap: float | None = None
    tolerance: float | None = None


KINDS = (
    Kind(torch.bfloat16, 64),
    Kind(torch.bfloat16, 72, temperature=True, tolerance=0.0),
    Kind(torch.bfloat16, 64, bias=True, temperature=True),
    Kind(torch.float16, 64, temperature=True),
    Kind(torch.bfloat16, 40, bias=True, temperature=True, softcap=30.0),
    Kind(torch.float32, 36, bias=True),
    Kind(torch.float64, 24, bias=True, temperature=True),
)


def make_rows(oracle, kind: Kind, rows: int, rng: torch.Generator, device: torch.device):
    """Make a call with extreme rows, and their upstream gradients."""

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=rng)

    vocabulary = int(torch.randint(1, 500, (), generator=rng))
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    largest = 2.0 if kind.dtype == torch.float16 else 4.0
    size = 10 ** uniform(rows, 1, low=-4.0, high=largest)
    weight = torch.randn(vocabulary, kind.depth, generator=rng) / kind.depth**0.5
    hidden = size * (torch.randn(rows, kind.depth, generator=rng) / 4)
    peaked = torch.rand(rows, generator=rng) < 0.3
    hidden[peaked] += (size * weight[targets])[peaked]
    hidden[torch.rand(rows, generator=rng) < 0.02] = 0
    bias = None
    if kind.bias:
        bias = torch.randn(vocabulary, generator=rng)
        forbidden = torch.rand(vocabulary, generator=rng) < 0.1
        forbidden[targets] = False
        bias[forbidden] = -torch.inf
        bias = bias.to(device, kind.dtype).requires_grad_()
    targets[torch.rand(rows, generator=rng) < 0.1] = IGNORED
    upstream = torch.randn(rows, generator=rng) * 10 ** uniform(rows, low=-6.0, high=0.0)
    upstream[torch.rand(rows, generator=rng) < 0.2] = 0
    hidden, weight = (t.to(device, kind.dtype).requires_grad_() for t in (hidden, weight))
    temperature = (10 ** uniform(rows, low=-1.3, high=1.3)).to(device) if kind.temperature else 1.0
    call = oracle.Call(hidden, weight, targets.to(device), bias, temperature, softcap=kind.softcap)
    return call, upstream.to(device)


def check(oracle, kind: Kind, call, upstream: Tensor) -> None:
    found = call.outputs(tolerance=kind.tolerance)["logprob"]
    d_hidden, *others = torch.autograd.grad((found * upstream).sum(), call.parameters)
    exact_call = call.to(torch.float64)
    exact = oracle.statistics(exact_call)
    exact_hidden = oracle.gradients(exact_call, exact, {"logprob": upstream})[0]

    assert not any(t.isnan().any() for t in (found, d_hidden, *others))
    assert (found <= 0).all()
    slope = torch.as_tensor(1 / call.temperature, device=found.device).double().expand(found.shape)
    # float32 sums of H products, relative to the sum of their sizes; the log-sum-exp adds a few ulp.
    sizes = (call.hidden.double().abs() @ call.weight.double().abs().T).amax(1)
    if call.bias is not None:
        sizes = sizes + call.bias.double().nan_to_num(neginf=0).abs().max()
    logit_error = (kind.depth + 8) * 2**-23 * sizes * slope + 1e-5 + 2**-22 * exact["logprob"].abs()
    assert ((found.double() - exact["logprob"]).abs() <= 2 * logit_error).all()

    widest = call.weight.double().norm(dim=1).max()
    lever = upstream.double().abs() * slope * widest * (call.targets != IGNORED)
    others_share = -exact["logprob"].expm1()
    allowed = lever * (2**-7 * 2 * others_share + torch.expm1(4 * logit_error.clamp(max=1)) + 2**-20)
    left_out = 2**-8 * (2 * upstream.double() * others_share).norm() * slope.max() * widest
    if kind.tolerance == 0:
        left_out = torch.zeros_like(left_out)
    smallest = torch.finfo(kind.dtype).tiny
    error = (d_hidden.double() - exact_hidden).norm(dim=1)
    bound = 2 * lever.where(logit_error > 0.25, allowed) + left_out + kind.depth * smallest
    assert (error <= bound).all(), (error - bound).max()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.drawn(8)
def test_a_few_extreme_rows_stay_finite_and_within_their_bounds(on_path, oracle, rng, kind):
    call, upstream = make_rows(oracle, kind, 24, rng, torch.device("cpu"))

    check(oracle, kind, on_path(call), on_path(upstream))


@pytest.mark.gpu
def test_a_hundred_thousand_extreme_rows_stay_finite_and_within_their_bounds(device, oracle, rng):
    rows, batches = 200, 500
    for batch in range(batches):
        kind = KINDS[batch % len(KINDS)]
        check(oracle, kind, *make_rows(oracle, kind, rows, rng, device))
