"""Padded batches as their live tokens, and back."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.integrations.padded import Packing


@pytest.fixture
def mask(rng: torch.Generator) -> torch.Tensor:
    mask = torch.rand(4, 7, generator=rng) < 0.6
    mask[2] = False
    return mask


def test_packing_keeps_the_live_tokens_row_by_row(mask, rng):
    hidden = torch.randn(4, 7, 3, generator=rng)

    packing = Packing.of(mask.long())

    assert torch.equal(packing.pack(hidden), hidden[mask])
    assert torch.equal(packing.sequence_ids, torch.arange(4)[:, None].expand(4, 7)[mask])
    assert (packing.num_tokens, packing.num_sequences) == (int(mask.sum()), 4)


def test_gradients_reach_live_tokens_only(mask, rng):
    values = torch.randn(4, 7, generator=rng, requires_grad=True)
    packing = Packing.of(mask)

    packing.pack(values).sum().backward()

    assert torch.equal(values.grad, mask.float())


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 7)])
def test_a_value_per_sequence_or_token_is_spread_over_the_live_tokens(shape, mask, rng):
    values = torch.randn(shape, generator=rng)

    spread = Packing.of(mask).spread(values)

    expected = values[:, None] if values.dim() == 1 else values
    assert torch.equal(spread, expected.expand(4, 7)[mask])


def test_what_is_not_given_stays_none_and_what_is_loses_its_gradient(mask):
    packing = Packing.of(mask)
    values = torch.ones(4, 7, dtype=torch.bfloat16, requires_grad=True)

    assert packing.constant(None) is None
    packed = packing.constant(values)
    assert packed.dtype == torch.float32 and not packed.requires_grad


def test_shapes_that_do_not_fit_are_named(mask):
    with pytest.raises(ValueError, match=r"mask must be \(B, T\), got shape \(28,\)"):
        Packing.of(mask.flatten())
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 6\) does not fit a mask of shape \(4, 7\)"):
        Packing.of(mask).pack(torch.zeros(4, 6))
