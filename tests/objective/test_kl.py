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


def exact_kl(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - ref)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(estimator: str, policies: tuple) -> None:
    logits, ref = policies
    logprobs = logits.log_softmax(0)

    mean = (logprobs.exp().detach() * kl_estimate(logprobs, ref, estimator)).sum()

    torch.testing.assert_close(mean, exact_kl(logits, ref))


def test_k2_has_the_gradient_of_the_kl_as_its_mean_gradient(policies: tuple) -> None:
    logits, ref = policies
    logprobs = logits.log_softmax(0)

    (gradient,) = torch.autograd.grad(
        (logprobs.exp().detach() * kl_estimate(logprobs, ref, "k2")).sum(), logits
    )

    torch.testing.assert_close(gradient, torch.autograd.grad(exact_kl(logits, ref), logits)[0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_importance_correction_k1_and_k3_have_it_too(estimator: str, policies: tuple) -> None:
    logits, ref = policies
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - logprobs.detach()).exp()

    (gradient,) = torch.autograd.grad(
        (logprobs.exp().detach() * ratio * kl_estimate(logprobs, ref, estimator)).sum(), logits
    )

    torch.testing.assert_close(gradient, torch.autograd.grad(exact_kl(logits, ref), logits)[0])


def test_k3_keeps_its_digits_where_the_policies_nearly_agree() -> None:
    difference = 1e-4

    estimate = kl_estimate(torch.tensor(difference), torch.tensor(0.0), "k3")

    assert estimate.item() == pytest.approx(difference**2 / 2, rel=1e-3)


def test_the_penalty_for_the_reward_is_detached(policies: tuple) -> None:
    logits, ref = policies
    logprobs = logits.log_softmax(0)

    penalty = kl_penalty(logprobs, ref, beta=0.5)

    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, 0.5 * (logprobs - ref).detach())
