"""Sampler correction and off-policy mask against loops over padded completions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, LossInputs, policy_loss
from grpo_fast.objective.correction import off_policy_keep, sampler_weights
from grpo_fast.objective.types import Segments


def rows(batch: Any) -> list[list[tuple[float, float]]]:
    """(log π_old, log π_sampler) of the tokens that count, by completion."""
    return [
        [(o, s) for o, s, counts in zip(*row, strict=True) if counts]
        for row in zip(batch.old.tolist(), batch.sampler.tolist(), batch.mask.tolist(), strict=True)
    ]


def segments_of(inputs: LossInputs) -> Segments:
    return Segments.of(inputs.sequence_ids, inputs.loss_mask, inputs.num_sequences, torch.float64)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_weights_are_the_bounded_ratio_at_their_level(level, action, make_batch):
    batch = make_batch(empty=True)
    inputs = batch.inputs()
    for low, high in ((0.8, 1.25), (None, 1.1), (0.9, None)):
        config = GRPOLossConfig(
            sampler_correction=f"{level}_{action}", sampler_clip_min=low, sampler_clip_max=high
        )
        weights = sampler_weights(inputs.old_logprobs, inputs.sampler_logprobs, segments_of(inputs), config)

        expected = []
        for tokens in rows(batch):
            for old, sampler in tokens:
                logs = [old - sampler] if level == "token" else [o - s for o, s in tokens]
                ratio = math.exp(sum(logs) / (len(logs) if level == "geometric" else 1))
                bounded = min(max(ratio, low or 0.0), high or math.inf)
                expected.append(bounded if action == "truncate" or bounded == ratio else 0.0)
        torch.testing.assert_close(weights[inputs.loss_mask], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("updates", [0, 1])
def test_the_ratio_of_whole_completions_gives_the_gradient_of_the_policys_own_ones(rng, updates):
    """Over all completions of three tokens as the sampler draws them. After an update, rloo's ratio, of whole
    completions too, takes the old policy to the current one."""
    completions = torch.cartesian_prod(*[torch.arange(3)] * 3)  # (27, 3)
    tables = torch.randn(3, 3, 3, 3, generator=rng, dtype=torch.float64)  # policy, place, token before, token
    current = tables[0].requires_grad_()

    def logprobs(table: torch.Tensor) -> torch.Tensor:
        before = completions.roll(1, 1) * torch.tensor([0, 1, 1])
        return table.log_softmax(-1)[torch.arange(3), before, completions].flatten()

    policy, sampler = logprobs(current), logprobs(tables[2]).detach()
    rewards, ids = torch.randn(27, generator=rng, dtype=torch.float64), torch.arange(27).repeat_interleave(3)
    share = sampler.view(27, 3).sum(1).exp()
    inputs = LossInputs(
        logprobs=policy,
        old_logprobs=logprobs(tables[updates]).detach(),
        sampler_logprobs=sampler,
        advantages=(27 * share * rewards)[ids],  # the loss takes a mean
        sequence_ids=ids,
        loss_mask=ids >= 0,
        num_sequences=27,
    )
    expected = -(policy.view(27, 3).sum(1).exp() * rewards).sum()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, current, retain_graph=True)[0]

    for correction, exact in (("sequence_mask", True), ("sequence_truncate", True), ("token_mask", False)):
        bounds = {"epsilon_low": 1e9, "sampler_correction": correction, "sampler_clip_max": 1e9}
        found = gradient(policy_loss(inputs, GRPOLossConfig("rloo", **bounds)).loss)
        assert torch.allclose(found, gradient(expected)) == exact


def test_weights_multiply_the_policy_term_but_not_the_kl(make_batch):
    # Every token is rejected: its upper bound lies below any ratio.
    config = GRPOLossConfig(
        beta=0.5, sampler_correction="token_mask", sampler_clip_min=None, sampler_clip_max=1e-6
    )

    outputs = policy_loss(make_batch().inputs(), config)

    torch.testing.assert_close(outputs.loss.detach(), 0.5 * outputs.metrics["kl"])
    assert outputs.metrics["sampling/rejected_mean"].item() == pytest.approx(1.0)


def test_mismatch_metrics_describe_sampler_against_trainer(make_batch):
    batch = make_batch()
    differences = [o - s for tokens in rows(batch) for o, s in tokens]
    count, bounded = len(differences), [min(math.exp(d), 1.1) for d in differences]
    config = GRPOLossConfig(sampler_correction="token_truncate", sampler_clip_max=1.1)

    metrics = policy_loss(batch.inputs(), config).metrics

    expected = {
        "sampling/logp_difference_mean": sum(map(abs, differences)) / count,
        "sampling/logp_difference_max": max(map(abs, differences)),
        "sampling/kl": sum(math.exp(d) - 1 - d for d in differences) / count,
        "sampling/kl_k1": -sum(differences) / count,
        "sampling/ratio_outside_mean": sum(not 0.9 <= math.exp(d) <= 1.1 for d in differences) / count,
        "sampling/importance_ratio_mean": sum(bounded) / count,
        "sampling/importance_ratio_min": min(bounded),
        "sampling/importance_ratio_max": max(bounded),
        "sampling/rejected_mean": 0.0,
    }
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected)


def test_only_drifted_sequences_of_negative_advantage_leave(make_batch):
    batch = make_batch(spread=0.6)
    drift = ((batch.sampler - batch.logprobs.detach()) * batch.mask).sum(1) / batch.mask.sum(1)
    threshold = drift.sort().values[1:3].mean().item()
    batch.advantages[drift.argmax()] = 0.0  # has no gradient, and stays
    inputs = batch.inputs()

    keep = off_policy_keep(
        inputs.logprobs, inputs.sampler_logprobs, inputs.advantages, segments_of(inputs), threshold
    )

    stays = (batch.advantages >= 0) | (drift <= threshold)
    assert torch.equal(keep, stays[inputs.sequence_ids])
