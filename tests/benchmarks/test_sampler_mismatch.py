"""The sampler of `sampler_mismatch`, and what is made of its runs."""

from __future__ import annotations

import copy

import pytest

from benchmarks import sampler_mismatch as mismatch
from benchmarks.step import LOSS
from benchmarks.tolerance_training import make_toy


def test_a_sampler_of_rounded_weights_has_few_values_in_a_row_and_reports_what_it_drew_from(
    seed, monkeypatch
):
    monkeypatch.setattr(mismatch, "PROMPTS", 2)
    monkeypatch.setattr(mismatch, "reward", lambda _, completion: float(completion.token_ids[0] % 2))
    policy = make_toy(seed)
    sampler = copy.deepcopy(policy)
    mismatch.round_weights(sampler, policy, 3)
    embeddings, rounded = (one.model.get_input_embeddings().weight for one in (policy, sampler))
    assert max(len(row.unique()) for row in rounded) <= 7
    assert (embeddings - rounded).abs().max() <= embeddings.abs().max() / 6 * 1.001

    far = {bits: mismatch.train(copy.deepcopy(policy), LOSS, bits, 1, seed)["kl"][0] for bits in (None, 3)}
    assert far[None] == pytest.approx(0, abs=1e-6) and far[3] > 1e-5


def test_the_summary_has_the_standard_error_over_the_seeds_of_each_arm():
    known = dict.fromkeys(mismatch.METRICS, 1.0)
    runs = [known | {"bits": 3, "correction": c, "score": s} for c, s in (("a", 0.2), ("b", 1), ("a", 0.4))]

    first, second = mismatch.summary(runs)

    assert (first["correction"], first["score"], first["error"]) == (
        "a",
        pytest.approx(0.3),
        pytest.approx(0.1),
    )
    assert (second["correction"], second["score"]) == ("b", 1)
