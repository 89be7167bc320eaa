from __future__ import annotations

import pytest
import torch

from grpo_fast.rollout import Sampling
from grpo_fast.rollout import sampling as sampling_module
from grpo_fast.rollout.sampling import derive_seed, draw, invert_cdf, make_warper


def uniforms(count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64)


@pytest.mark.parametrize("width", [3, 257, 5000])
def test_each_token_owns_an_interval_of_its_probability(width, seed):
    probs = (3 * torch.randn(64, width)).softmax(-1)
    u = uniforms(64)

    tokens = invert_cdf(probs, u)

    cdf = torch.nn.functional.pad(probs.double().cumsum(-1), (1, 0)) / probs.double().sum(-1, keepdim=True)
    low, high = (cdf.gather(-1, tokens[:, None] + side)[:, 0] for side in (0, 1))
    assert (low - 1e-12 <= u).all() and (u <= high + 1e-12).all()


@pytest.mark.parametrize("edge", [0.0, 1 - 2.0**-53])
def test_no_uniform_samples_a_token_of_zero_probability(edge):
    probs = torch.zeros(3, 600)
    probs[0, 10], probs[1, 599], probs[2, 300] = 1.0, 1.0, 0.1

    assert invert_cdf(probs, torch.full((3,), edge, dtype=torch.float64)).tolist() == [10, 599, 300]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 0.0}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"min_p": 0.45}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_support_is_restricted_and_renormalized_unless_greedy(options, kept, seed):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probs.log().expand(2000, -1)

    tokens, logprobs = draw(logits, uniforms(2000), make_warper(Sampling(1, **options)))

    assert set(tokens.tolist()) == kept
    total = 1 if options == {"temperature": 0.0} else probs[sorted(kept)].sum()
    torch.testing.assert_close(logprobs, (probs[tokens] / total).log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 2.0},
        {"max_completion_length": 0},
        {"stop": ("",)},
    ],
    ids=str,
)
def test_values_outside_their_ranges_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**({"max_completion_length": 4} | wrong))


def test_slices_do_not_change_samples(seed, monkeypatch):
    logits, u, warper = torch.randn(50, 400), uniforms(50), make_warper(Sampling(1, temperature=0.7))
    whole = draw(logits, u, warper)
    monkeypatch.setattr(sampling_module, "SLICE", 1000)

    for a, b in zip(draw(logits, u, warper), whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_are_reported(temperature, bad):
    logits = torch.zeros(2, 300)
    logits[1, 7] = bad

    with pytest.raises(FloatingPointError):
        draw(logits, uniforms(2), make_warper(Sampling(1, temperature=temperature)))


def test_every_completion_has_a_seed_of_its_own(rng):
    seed = int(torch.randint(2**62, (), generator=rng))
    bases, prompts = (seed, seed + 1), range(64)
    seeds = {derive_seed(base, prompt, number) for base in bases for prompt in prompts for number in prompts}

    assert len(seeds) == 2 * 64 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
