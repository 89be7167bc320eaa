"""Padded batches as their live tokens, and the losses of those."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.padded import Packing, own_totals, padded_local_loss, padded_policy_loss
from grpo_fast.objective import StepTotals


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
    with pytest.raises(ValueError, match=r"mask.*\(28,\)"):
        Packing.of(mask.flatten())
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(4, 7\)"):
        Packing.of(mask).pack(torch.zeros(4, 6))


def test_masked_entries_are_never_read(rng: torch.Generator) -> None:
    mask = torch.rand(3, 6, generator=rng) < 0.6
    mask[0, 0] = True
    logprobs = torch.randn(3, 6, generator=rng).masked_fill(~mask, torch.nan).requires_grad_()
    advantages = torch.randn(3, 6, generator=rng).masked_fill(~mask, torch.inf)
    padded_policy_loss(
        GRPOLossConfig("dapo"), mask, None, logprobs=logprobs, advantages=advantages
    ).loss.backward()
    assert logprobs.grad.isfinite().all() and not logprobs.grad[~mask].any()


@pytest.mark.parametrize("name", ["dapo", "grpo", "luspo"])
def test_local_and_shared_metrics_belong_to_one_loss(name: str, rng: torch.Generator) -> None:
    mask = torch.rand(3, 6, generator=rng) < 0.7
    mask[:, 0] = True
    tensors = {
        "logprobs": torch.randn(3, 6, generator=rng),
        "old_logprobs": torch.randn(3, 6, generator=rng),
        "advantages": torch.randn(3, generator=rng),
    }
    totals = StepTotals(num_tokens=40, num_sequences=9)
    config = GRPOLossConfig(name)
    shared = padded_policy_loss(config, mask, totals, **tensors)
    local = padded_local_loss(config, mask, totals, **tensors)
    torch.testing.assert_close(local.loss, shared.loss)
    own = padded_policy_loss(config, mask, own_totals(mask), **tensors)
    torch.testing.assert_close(local.metrics, own.metrics)


def test_policy_weights_scale_each_tokens_term(rng: torch.Generator) -> None:
    mask = torch.ones(2, 5)
    logprobs, old, weights = (torch.rand(2, 5, generator=rng) for _ in range(3))
    config = GRPOLossConfig("dapo")

    def loss(advantages: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return padded_policy_loss(
            config, mask, None, logprobs=logprobs, old_logprobs=old, advantages=advantages, **more
        ).loss

    advantages = torch.randn(2, 5, generator=rng)
    # The clipped term is linear in the advantage.
    torch.testing.assert_close(loss(advantages, policy_weights=weights), loss(advantages * weights))


def test_an_empty_sequence_is_not_counted() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert own_totals(mask) == StepTotals(num_tokens=2.0, num_sequences=1.0)
