"""KL estimators, in expectation over a whole distribution."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.objective.loss import kl_estimate, kl_penalty


@pytest.fixture
def policies(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, requiring grad, and log-probabilities of a reference near it. Vocabulary of 7."""
    logits = torch.randn(7, generator=rng, dtype=torch.float64)
    ref = (logits + 0.3 * torch.randn(7, generator=rng, dtype=torch.float64)).log_softmax(0)
    return logits.requires_grad_(), ref


@pytest.mark.parametrize(
    ("estimator", "corrected"), [("k1", False), ("k3", False), ("k1", True), ("k2", False), ("k3", True)]
)
def test_the_mean_of_k1_and_k3_is_the_kl_and_so_is_its_gradient_where_promised(
    estimator, corrected, policies
):
    logits, ref = policies
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - logprobs.detach()).exp() if corrected else 1.0

    mean = (logprobs.exp().detach() * ratio * kl_estimate(logprobs, ref, estimator)).sum()

    exact = (logprobs.exp() * (logprobs - ref)).sum()
    if estimator != "k2":
        torch.testing.assert_close(mean, exact)
    if estimator == "k2" or corrected:
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    estimate = kl_estimate(torch.tensor(1e-4), torch.tensor(0.0), "k3")
    assert estimate.item() == pytest.approx(1e-8 / 2, rel=1e-3)


def test_the_penalty_for_the_reward_is_detached(policies):
    logits, ref = policies
    logprobs = logits.log_softmax(0)
    penalty = kl_penalty(logprobs, ref, beta=0.5)
    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, 0.5 * (logprobs - ref).detach())
