"""Losses of padded batches."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import GRPOLossConfig
from grpo_fast.integrations.padded import local_totals, padded_policy_loss
from grpo_fast.objective import StepTotals


@pytest.fixture
def mask(rng):
    mask = torch.rand(4, 7, generator=rng) < 0.6
    mask[2], mask[0, 0] = False, True
    return mask


@pytest.mark.parametrize("name", ["dapo", "grpo", "luspo"])
def test_a_padded_loss_divides_by_the_step_and_measures_itself(name, mask, rng):
    tensors = {field: torch.randn(4, 7, generator=rng) for field in ("logprobs", "old_logprobs")}
    tensors["advantages"] = torch.randn(4, generator=rng)
    config = GRPOLossConfig(name)

    own = padded_policy_loss(config, mask, local_totals(mask, None, None), **tensors)
    step = padded_policy_loss(config, mask, local_totals(mask, 40, 9), **tensors)

    share = mask.sum() / 40 if name == "dapo" else mask.any(dim=1).sum() / 9
    torch.testing.assert_close(step.loss, own.loss * share)
    torch.testing.assert_close(step.metrics, own.metrics)


def test_masked_entries_are_never_read_and_their_sequences_not_counted(mask, rng):
    logprobs = torch.randn(4, 7, generator=rng).masked_fill(~mask, torch.nan).requires_grad_()
    advantages = torch.randn(4, 7, generator=rng).masked_fill(~mask, torch.inf)
    totals, config = local_totals(mask, None, None), GRPOLossConfig("dapo")

    padded_policy_loss(config, mask, totals, logprobs=logprobs, advantages=advantages).loss.backward()

    assert logprobs.grad.isfinite().all() and not logprobs.grad[~mask].any()
    counts = float(mask.sum()), float(mask.any(dim=1).sum())
    assert totals == StepTotals(*counts, *counts)
