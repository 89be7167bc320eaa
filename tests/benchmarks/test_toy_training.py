"""The toy of `tolerance_training` and `sampler_mismatch`: its answers, and what is trained on it and how."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from benchmarks import sampler_mismatch
from benchmarks import tolerance_training as training
from benchmarks.step import LOSS
from benchmarks.tolerance_training import ARROW, CERTIFIED, END, EXACT, FULL, STRIDE
from grpo_fast.policy import Policy, Sample


@pytest.fixture(scope="module")
def toy() -> Policy:
    """Peaked enough that something can be left out."""
    policy = training.make_toy(seed=random.randrange(1 << 30))
    with torch.no_grad():
        policy.base_model.model.norm.weight.mul_(40)
    return policy


def test_the_answer_is_the_sorted_digits_and_the_end():
    prompt = (*(STRIDE * digit for digit in (3, 1, 4, 1, 5)), ARROW)

    assert training.answer(prompt) == (*(STRIDE * digit for digit in (1, 1, 3, 4, 5)), END)
    drawn = training.draw_prompt(random.Random(0))
    assert drawn[-1] == ARROW and all(symbol % STRIDE == 0 for symbol in drawn)


def test_the_exact_head_has_the_gradient_of_full_logits_and_the_certified_one_nearly(toy, seed):
    chance = random.Random(seed)  # not sampled: a group of equal completions would have no gradient
    prompts = [training.draw_prompt(chance) for _ in range(16)]
    samples = [
        Sample(prompt, tuple(chance.choices(range(2048), k=6)), chance.random(), i, (0.0,) * 6)
        for i, prompt in enumerate(prompts)
    ]

    full, exact, certified = (training.gradient(name, toy, samples) for name in (FULL, EXACT, CERTIFIED))

    assert (exact - full).norm() <= 1e-4 * full.norm()
    assert 0 < (certified - exact).norm() <= 0.1 * full.norm()
    found = training.difference(toy, samples)
    assert found["relative"] == pytest.approx(((certified - full).norm() / full.norm()).item(), rel=1e-3)
    assert 0 < found["one_minus_cosine"] < 0.01


def test_a_training_run_follows_from_its_seed(monkeypatch):
    monkeypatch.setattr(training, "PROMPTS", 2)
    monkeypatch.setattr(training, "reward", lambda _, completion: float(completion.token_ids[0] % 2))
    start = training.make_toy(seed=0)

    first, again, other = (training.train(copy.deepcopy(start), EXACT, 2, seed) for seed in (5, 5, 6))

    assert first == again != other
    assert first["final"] == pytest.approx(sum(first["rewards"]) / 2)


def test_rounded_weights_have_few_values_in_a_row_and_are_far_from_the_policy(seed, monkeypatch):
    monkeypatch.setattr(training, "PROMPTS", 2)
    policy = training.make_toy(seed)
    sampler = sampler_mismatch.rounded(copy.deepcopy(policy), policy, 3)
    exact, few = (one.model.get_input_embeddings().weight for one in (policy, sampler))
    assert max(len(row.unique()) for row in few) <= 7
    assert ((exact - few).abs() <= exact.abs().amax(1, keepdim=True) / 6 * 1.001).all()

    by_bits = [sampler_mismatch.train(policy, LOSS, bits, 1, seed)["kl"] for bits in (None, 3)]
    assert by_bits[0] < 1e-6 < 1e-5 < by_bits[1]


def test_the_summaries_are_over_seeds():
    found = training.summary({FULL: [{"final": 0.5}, {"final": 0.7}]})[FULL]
    known = dict.fromkeys(sampler_mismatch.METRICS, 1.0)
    runs = [known | {"bits": 3, "correction": c, "score": s} for c, s in (("a", 0.2), ("b", 1), ("a", 0.4))]
    arms = [(arm["correction"], arm["score"], arm["error"]) for arm in sampler_mismatch.summary(runs)]

    assert found == pytest.approx({"mean": 0.6, "low": 0.5, "high": 0.7})
    assert arms[0] == ("a", pytest.approx(0.3), pytest.approx(0.1)) and arms[1][:2] == ("b", 1)
