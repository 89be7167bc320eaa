"""The sampler of `sampler_mismatch`, and what is made of its runs."""

from __future__ import annotations

import copy

import pytest

from benchmarks import sampler_mismatch, tolerance_training
from benchmarks.step import LOSS


def test_rounded_weights_have_few_values_in_a_row_and_are_far_from_the_policy(seed, monkeypatch):
    monkeypatch.setattr(tolerance_training, "PROMPTS", 2)
    policy = tolerance_training.make_toy(seed)
    sampler = sampler_mismatch.rounded(copy.deepcopy(policy), policy, 3)
    exact, few = (one.model.get_input_embeddings().weight for one in (policy, sampler))
    assert max(len(row.unique()) for row in few) <= 7
    assert ((exact - few).abs() <= exact.abs().amax(1, keepdim=True) / 6 * 1.001).all()

    by_bits = [sampler_mismatch.train(policy, LOSS, bits, 1, seed)["kl"] for bits in (None, 3)]
    assert by_bits[0] < 1e-6 < 1e-5 < by_bits[1]


def test_the_summary_has_the_standard_error_over_the_seeds_of_each_arm():
    known = dict.fromkeys(sampler_mismatch.METRICS, 1.0)
    runs = [known | {"bits": 3, "correction": c, "score": s} for c, s in (("a", 0.2), ("b", 1), ("a", 0.4))]
    found = [(arm["correction"], arm["score"], arm["error"]) for arm in sampler_mismatch.summary(runs)]
    assert found[0] == ("a", pytest.approx(0.3), pytest.approx(0.1)) and found[1][:2] == ("b", 1)
