"""The exact backward against float64 gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import ProductTile, dense
from grpo_fast.kernels.dense import dense_backward

from grpo_fast.head.problem import HeadGradients, LogitGradient, Wanted

POINTERS = ProductTile(16, 128, 16, warps=4, stages=2, group=2, descriptors=False)
DESCRIPTORS = ProductTile(32, 256, 16, warps=4, stages=2, group=2, descriptors=True)


def run(head, *, tile=DESCRIPTORS, columns=256, g=None, **wanted) -> HeadGradients:
    head = head if g is None else replace(head, g=g)
    wanted = {"hidden": True, "weight": True, "bias": head.bias is not None} | wanted
    return HeadGradients(
        *dense_backward(head.problem, head.gradient, Wanted(**wanted), tile=tile, columns=columns)
    )


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("vocabulary", [1, 128, 129, 256, 257, 600])
@pytest.mark.parametrize("transformed", [False, True])
def test_gradients_match_for_every_vocabulary_and_chunk_edge(make_head, tile, vocabulary, transformed):
    head = make_head(33, vocabulary, 40, transformed=transformed, g_logsumexp=True)

    found = run(head, tile=tile)

    assert relative(found.hidden, head.d_hidden) < 2e-5
    assert relative(found.weight, head.d_weight) < 2e-5
    if transformed:
        assert relative(found.bias, head.d_bias) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_half_precision_errs_by_rounding_the_logit_gradient_and_the_result_once(make_head, dtype, scale):
    head = make_head(60, 600, 40, dtype=dtype, peak=20.0)

    found = run(head, g=scale * head.g)

    assert relative(found.hidden / scale, head.d_hidden) < 3e-3
    if scale == 1.0 or dtype == torch.bfloat16:
        assert relative(found.weight.float() / scale, head.d_weight) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, dense._ADDS_IN_FLOAT32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_products_are_added_in_float32_by_every_torch(
    device, rng, monkeypatch, dtype, in_place
):
    monkeypatch.setattr(dense, "_ADDS_IN_FLOAT32", in_place)
    left, right = (torch.randn(2, 96, 64, generator=rng) / 8).to(device, dtype)
    total = torch.randn(96, 96, generator=rng).to(device)
    exact = total.double() + left.double() @ right.double().T

    found = dense._accumulate(total, left, right.t())

    assert found is total
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


def test_chunking_changes_nothing_but_the_order_of_a_sum(make_head):
    head = make_head(33, 600, 40)

    whole, chunked = run(head, columns=768), run(head, columns=256)

    torch.testing.assert_close(whole.hidden, chunked.hidden, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.weight, chunked.weight)


def test_entropy_and_mean_gradients_match(make_head, rng):
    head = make_head(20, 300, 24)
    device = head.hidden.device
    hidden = head.hidden.double().requires_grad_()
    weight = head.weight.double().requires_grad_()
    of_entropy, of_mean = (torch.randn(20, generator=rng).to(device) for _ in range(2))
    logits = hidden @ weight.T
    logprobs = logits.log_softmax(1)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    exact = torch.autograd.grad(
        (entropy * of_entropy).sum() + (logits.mean(1) * of_mean).sum(), (hidden, weight)
    )
    entropy = entropy.detach().float()
    # No target: the entry of a row's target is only replaced where there is one.
    rows = LogitGradient(
        head.logsumexp,
        torch.zeros_like(of_mean),
        torch.zeros_like(of_mean),
        entropy,
        of_entropy,
        of_mean / 300,
    )

    problem = head.problem._replace(targets=torch.full_like(head.targets, -1))
    wanted = Wanted(hidden=True, weight=True, bias=False)
    hidden, weight, _ = dense_backward(problem, rows, wanted, tile=DESCRIPTORS, columns=256)

    for got, expected in zip((hidden, weight), exact, strict=True):
        assert relative(got, expected) < 2e-5
