"""The toy of `tolerance_training`: its reward and loss, and how its three ways of training differ."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks import tolerance_training as training
from benchmarks.tolerance_training import ARROW, CERTIFIED, END, EXACT, FULL, STRIDE


@pytest.fixture
def toy(rng: torch.Generator) -> torch.nn.Module:
    """Peaked enough that something can be left out."""
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(1 << 30, (), generator=rng)))
        model = training.make_model()
    with torch.no_grad():
        model.model.norm.weight.mul_(40)
    return model


def test_a_reward_is_earned_by_the_sorted_digits_and_the_end():
    digits = torch.tensor([3, 1, 4, 1, 5]) * STRIDE
    right = torch.tensor([*digits, ARROW, *digits.sort().values, END])
    wrong, unfinished = right.clone(), right.clone()
    wrong[[6, 10]], unfinished[-1] = right[[10, 6]], ARROW

    assert training.rewards_of(torch.stack([right, wrong, unfinished])).tolist() == [1, 0, 0]


def test_tokens_behind_the_end_do_not_count(rng):
    tokens = torch.full((training.GROUP, 12), ARROW)
    tokens[:, 8] = END
    logprobs = torch.randn(training.GROUP, 6, generator=rng).requires_grad_()
    rewards = (torch.arange(training.GROUP) % 2).float()

    (gradient,) = torch.autograd.grad(training.policy_loss(logprobs, tokens, rewards), logprobs)

    assert (gradient[:, :3] != 0).all() and (gradient[:, 3:] == 0).all()


def test_the_exact_head_has_the_gradient_of_full_logits_and_the_certified_one_nearly(toy, rng):
    # Not sampled: a group of equal completions would have no gradient but rounding.
    tokens = torch.randint(training.VOCABULARY, (2 * training.GROUP, 12), generator=rng)
    rewards = torch.rand(len(tokens), generator=rng)

    def gradient(name: str) -> torch.Tensor:
        logprobs = training.completion_logprobs(toy, tokens, training.VARIANTS[name])
        return training.gradient(toy, training.policy_loss(logprobs, tokens, rewards))

    full, exact, certified = (gradient(name) for name in (FULL, EXACT, CERTIFIED))

    assert (exact - full).norm() <= 1e-4 * full.norm()
    assert 0 < (certified - exact).norm() <= 0.1 * full.norm()


def test_a_training_run_follows_from_its_seed(toy, monkeypatch):
    monkeypatch.setattr(training, "rewards_of", lambda tokens: (tokens.sum(1) % 3).float())
    first, again = (
        training.train(copy.deepcopy(toy), training.VARIANTS[EXACT], steps=2, seed=5) for _ in range(2)
    )

    assert first == again
    assert len(first["rewards"]) == 2 and set(first["gradient"]) == {0, 1}


def test_groups_of_one_reward_have_no_gradient_to_compare(toy, monkeypatch):
    monkeypatch.setattr(training, "rewards_of", lambda tokens: torch.ones(len(tokens)))

    run = training.train(toy, training.VARIANTS[EXACT], steps=1, seed=5)

    assert run["gradient"] == {0: None}


def test_the_summary_is_over_seeds():
    runs = {FULL: [{"final": 0.5}, {"final": 0.7}]}

    found = training.summary(runs)[FULL]

    assert found == pytest.approx({"mean": 0.6, "deviation": 0.02**0.5, "low": 0.5, "high": 0.7})
