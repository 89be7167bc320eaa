"""The exact backward against float64 gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grpo_fast.kernels import ProductTile, dense
from grpo_fast.kernels.dense import dense_backward

from grpo_fast.head.call import HeadGradients, Wanted

POINTERS = ProductTile(16, 128, 16, warps=4, stages=2, group=2, descriptors=False)
DESCRIPTORS = ProductTile(32, 256, 16, warps=4, stages=2, group=2, descriptors=True)


def run(head, *, tile=DESCRIPTORS, columns=256, g=None, **wanted) -> HeadGradients:
    head = head if g is None else replace(head, g=g)
    wanted = {"hidden": True, "weight": True, "bias": head.bias is not None} | wanted
    return HeadGradients(
        *dense_backward(head.call, head.gradient, Wanted(**wanted), tile=tile, columns=columns)
    )


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("tile", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
@pytest.mark.parametrize(
    ("vocabulary", "transformed"),
    [(1, True), (128, False), (129, True), (256, True), (257, False), (600, True)],
)
def test_gradients_match_for_every_vocabulary_and_chunk_edge(make_head, tile, vocabulary, transformed):
    head = make_head(33, vocabulary, 40, transformed=transformed, g_logsumexp=True)

    found = run(head, tile=tile)

    exact = {"hidden": head.d_hidden, "weight": head.d_weight, "bias": head.d_bias}
    for name, expected in list(exact.items())[: 2 + transformed]:
        assert relative(getattr(found, name), expected) < 2e-5
    if vocabulary == 600:
        assert torch.equal(found.weight, run(head, tile=tile, columns=768).weight)


def test_tiny_float16_gradients_err_by_two_roundings(make_head):
    head = make_head(60, 600, 40, dtype=torch.float16, peak=20.0)

    found = run(head, g=1e-6 * head.g)

    assert relative(found.hidden / 1e-6, head.d_hidden) < 3e-3


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
