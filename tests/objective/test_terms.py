"""KL estimates, sampler correction, off-policy mask and entropy, against loops over padded completions."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_fast.objective import GRPOLossConfig, policy_loss
from grpo_fast.objective.terms import EntropyController, kl_estimate, off_policy_keep, sampler_weights
from grpo_fast.objective.types import Segments


@pytest.mark.parametrize(
    ("estimator", "corrected"), [("k1", False), ("k3", False), ("k1", True), ("k2", False), ("k3", True)]
)
def test_the_mean_of_k1_and_k3_and_the_promised_gradients_are_the_kls(estimator, corrected, rng):
    logits = torch.randn(7, generator=rng, dtype=torch.float64, requires_grad=True)
    ref = (logits.detach() + 0.3 * torch.randn(7, generator=rng, dtype=torch.float64)).log_softmax(0)
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - logprobs.detach()).exp() if corrected else 1.0

    mean = (logprobs.exp().detach() * ratio * kl_estimate(logprobs, ref, estimator)).sum()

    exact = (logprobs.exp() * (logprobs - ref)).sum()
    if estimator != "k2":
        torch.testing.assert_close(mean, exact)
    if estimator == "k2" or corrected:
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


@pytest.mark.parametrize("apart", [-1e-4, 19.5, 30.0, 300.0])  # nats; e^300 is no float32
def test_k3_is_finite_where_the_policies_are_far_apart_as_verls_is(apart):
    logprob = torch.tensor(-apart, requires_grad=True)

    estimate = kl_estimate(logprob, torch.tensor(0.0), "k3")
    estimate.backward()

    bounded = min(apart, 20.0)
    tolerance = 1e-5 if apart > 0 else 1e-3
    assert estimate.item() == pytest.approx(math.expm1(bounded) - bounded, rel=tolerance)
    assert logprob.grad.item() == pytest.approx(-math.expm1(apart) if apart < 20 else 0.0, rel=tolerance)


def rows(batch):
    """(log π_old, log π_sampler) of the tokens that count, by completion."""
    return [
        [(o, s) for o, s, counts in zip(*row, strict=True) if counts]
        for row in zip(batch.old.tolist(), batch.sampler.tolist(), batch.mask.tolist(), strict=True)
    ]


def segments_of(inputs):
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


def test_weights_multiply_the_policy_term_but_not_the_kl(make_batch):
    # Every token is rejected: its upper bound lies below any ratio.
    config = GRPOLossConfig(beta=0.5, sampler_correction="token_mask", sampler_clip_max=1e-6)

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
    batch.advantages.fill_(-1.0)
    batch.advantages[drift.argmax()] = 0.0  # has no gradient, and stays
    inputs = batch.inputs()

    keep = off_policy_keep(
        inputs.logprobs, inputs.sampler_logprobs, inputs.advantages, segments_of(inputs), threshold
    )

    stays = (batch.advantages >= 0) | (drift <= threshold)
    assert 0 < stays.sum() < len(stays)
    assert torch.equal(keep, stays[inputs.sequence_ids])


@pytest.mark.parametrize("quantile", [0.0, 0.3])
def test_the_tokens_of_highest_entropy_keep_their_policy_term(quantile, make_batch):
    batch = make_batch()
    batch.advantages[:] = 1.0
    config = GRPOLossConfig("reinforce", top_entropy_quantile=quantile)

    outputs = policy_loss(batch.inputs(), config)
    gradient = torch.autograd.grad(outputs.loss, batch.logprobs)[0]

    entropy = batch.entropy.detach()
    highest = batch.mask & (entropy >= entropy[batch.mask].quantile(1 - quantile))
    assert torch.equal(gradient != 0, highest)  # quantile zero keeps one token
    masked = 1 - highest.sum() / batch.mask.sum()
    assert outputs.metrics["policy/masked_mean"].item() == pytest.approx(masked.item())
    assert outputs.metrics["entropy"].item() == pytest.approx(entropy[batch.mask].mean().item())


def test_the_controller_raises_its_weight_while_entropy_is_low_and_resumes():
    bounds = {"entropy_coef_delta": 0.1, "entropy_coef_min": 0.02, "entropy_coef_max": 0.15}
    config = GRPOLossConfig(use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=1.0, **bounds)
    controller = EntropyController.of(config)
    history = [controller.active_coef]

    for entropy in (0.5, 0.5, 1.0, 2.0, 0.9, 3.0, 3.0):
        controller.update(entropy)
        history.append(controller.active_coef)
        restored = EntropyController.of(controller.config)
        restored.load_state_dict(controller.state_dict())
        assert restored == controller
        controller = restored

    # Up by 0.1 to the ceiling of 0.15; a step above the target takes 0.1 off and switches the bonus off.
    assert history == pytest.approx([0.0, 0.15, 0.15, 0.15, 0.0, 0.15, 0.0, 0.0])
    assert controller.coef == 0.02
